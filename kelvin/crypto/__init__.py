"""Keys and certificates: mutual TLS by roles, mutual TLS of nodes, keys that sign versions.

Sockets that use them are in `kelvin.ipc`, signed statements in `kelvin.contracts.artifacts`. Begin with
`tls_identity.py` or `signing_keys.py`.
"""
