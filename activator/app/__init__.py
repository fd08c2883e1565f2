"""Build, start and stop the activator: settings, order of start and end, health and readiness. Requests are handled in
`api/`. This package may import every other folder; none imports it. Begin with `app.py`, then `components.py`.
"""
