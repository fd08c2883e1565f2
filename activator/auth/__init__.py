"""Find out who calls: API keys, signed tokens of trusted issuers, the operator's firewall.

What a principal may do with a model is decided in `routing/` and `api/`; limits on failed attempts are in `http/`.
Begin with `authenticator.py`.
"""
