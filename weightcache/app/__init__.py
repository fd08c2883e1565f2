"""Build and start the agent: settings, the lease socket, the HTTP API, metrics, the tiers put together.

How a version is loaded is in `fetch/`, what a tier does is in `host/`, `nvme/`, `peers/` and `sources/`. Every other
folder may be imported here, and none imports this one. Begin with `cache.py`, then `lease_server.py`.
"""
