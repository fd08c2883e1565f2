"""Calls between processes: sockets, connectors, clients, TLS listeners, routes, and the zygote.

Certificates are in `kelvin.crypto`, bodies in `kelvin.contracts`, start and drain in `kelvin.process`. Begin with
`internal_server.py` for a process among the others, and `service_client.py` for a call.
"""
