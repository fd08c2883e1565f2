"""Keep the tenants, keys, models and versions from the feed, and decide which model and version a request means.
`queue/` decides which replica a request gets. Begin with `routing_table.py` for the state, `request_routes.py` for
paths, `policy/version_resolution.py` for versions.
"""
