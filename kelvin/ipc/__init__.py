"""Calls between processes: sockets, connectors, clients, TLS listeners, routes, and the zygote.

Certificates are in `kelvin.crypto`, message bodies in `kelvin.contracts`, start and drain in `kelvin.process`. Begin
with `internal_server.py` for serving, and `service_client.py` for a call.
"""
