"""Serve the admin API and the internal API: the routes, and who may call them.

Stores decide what is valid; what `kelvin status` shows is put together in `status/`; what bodies hold is in `types/`.
Begin with `admin_api.py` for people and `internal_api.py` for the other processes.
"""
