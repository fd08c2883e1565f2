"""Build and start the snapshotter: settings, routes, roles.

The routes' work is done in `push/`, `store/` and `maintenance/`. This folder may import every other folder, and none
imports it. Begin with `app.py`, then `routes.py`.
"""
