"""The tiered weight cache: the agent that owns the tiers, and the library by which a runtime leases from it.

Versions are made by `snapshotter` and bound to an engine by `runtime`. Begin with `cache.py`, which puts the tiers
together, and `client.py`, the runtime's side. `residents.py` loads a version into memory, `nvme.py`, `peer_tier.py` and
`remote.py` are the tiers below, `verifying.py` checks every byte.
"""
