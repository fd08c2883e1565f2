"""Serve HTTP/1.1 to the public: listeners, connections, limits per address, one request and its response. TLS
certificates are in `tls/`, path matching is in `routing/`, request handlers are in `api/`. Begin with
`http1_protocol.py` for a connection, or `exchange.py` for the request that a handler sees.
"""
