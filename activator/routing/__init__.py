"""Know tenants, keys, models and versions from the feed, and decide which model and version a request means.

Which replica a request gets is decided in `queue/`.
Begin with `routing_table.py` for the state, `request_routes.py` for paths, `policy/traffic_split.py` for versions.
"""
