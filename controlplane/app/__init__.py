"""Build the control plane from its parts and run it, on one machine or as one of several on a cluster.

The parts themselves are in the other folders. Begin with `app.py`, which reads top to bottom; `settings.py` has every
setting.
"""
