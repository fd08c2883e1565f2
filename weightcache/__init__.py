"""The tiered weight cache: an agent that keeps model weights in memory and on disk, and the library that leases them.

`snapshotter` makes versions and `runtime` binds them to an engine. A runtime imports `client/`; the other folders
belong to the agent, but `client/` uses the digest check of `sources/source.py`. Begin with `app/cache.py`, which
composes the tiers, and `client/lease.py`.
"""
