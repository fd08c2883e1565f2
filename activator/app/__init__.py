"""Build, start and stop the activator: settings, the order of start and end, health and readiness.

No request is handled here; see `api/` for that. Every other folder may be imported here, and none imports this one.
Begin with `app.py`, the composition root.
"""
