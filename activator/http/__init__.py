"""Serve HTTP/1.1 to the public: listeners, connections, bounds on strangers, one request and its response.

TLS certificates are in `tls/`, what a path means is in `routing/`, handlers are in `api/`.
Begin with `http1_protocol.py` for a connection, or `exchange.py` for what a handler sees of a request.
"""
