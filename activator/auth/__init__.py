"""Authenticate callers: API keys, signed tokens of trusted issuers, the operator's firewall. `routing/` and `api/`
decide what a principal may do with a model; limits on failed attempts are in `http/`. Begin with `authenticator.py`.
"""
