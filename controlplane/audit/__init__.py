"""Record who changed what, chain the entries, and let old ones expire.

The chain itself is `db/chained_log.py`; the routes are in `api/audit_api.py`. Begin with `audit_log.py`.
"""
