"""Keep tenants, keys, grants, models and versions, and publish them to activators in the feed.

Model bytes are in `snapshotter`; which versions run is decided in `scaling/`. The routes are in `api/`.
Begin with `registry.py` for models and `tenant_store.py` for tenants; `policy/domain.py` has the types.
"""
