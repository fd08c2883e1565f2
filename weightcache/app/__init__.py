"""Build and start the agent: settings, the lease socket, the HTTP API, metrics, and the composition of the tiers.

Loading of versions is in `fetch/`, tiers are in `host/`, `nvme/`, `peers/` and `sources/`. No other folder imports this
one. Begin with `cache.py`, then `lease_server.py`.
"""
