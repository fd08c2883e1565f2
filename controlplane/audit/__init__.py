"""Record who changed what, chain the entries, and let old ones expire.

The hash chain is in `db/chained_log.py`, the routes in `api/audit_api.py`. Begin with `audit_log.py`.
"""
