"""Build and start the snapshotter: settings, routes, who may call them.

What a route does is in `push/`, `store/` and `maintenance/`. Every other folder may be imported here, and none imports
this one. Begin with `app.py`, then `routes.py`.
"""
