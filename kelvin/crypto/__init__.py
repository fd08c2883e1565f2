"""Keys and certificates: mutual TLS by role, mutual TLS of nodes, and keys that sign versions.

Sockets are in `kelvin.ipc`, signed statements in `kelvin.contracts.artifacts`. Begin with `tls_identity.py` or
`signing_keys.py`.
"""
