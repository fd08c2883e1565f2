"""Serve the admin API and the internal API: the routes, and which process may call them.

Stores decide what is valid; `status/` builds the answers of `kelvin status`; `types/` has the bodies. Begin with
`admin_api.py` for people and `internal_api.py` for other processes.
"""
