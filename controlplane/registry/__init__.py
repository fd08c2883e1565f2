"""Store tenants, keys, grants, models and versions, and publish them to activators in the feed.

Model bytes are in `snapshotter`; `scaling/` decides which versions run; the routes are in `api/`. Begin with
`registry.py` for models and `tenant_store.py` for tenants; `policy/domain.py` has the types.
"""
