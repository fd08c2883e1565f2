"""The tiered weight cache: an agent that keeps model weights in memory and on disk, and the library that leases them.

Versions are made by `snapshotter` and bound to an engine by `runtime`. `client/` is all that a runtime imports; the
other folders are the agent's. Begin with `app/cache.py`, which puts the tiers together, and `client/lease.py`.
"""
