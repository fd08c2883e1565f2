"""Build the control plane out of its parts, and run it: on one machine, or as one of several on a cluster.

What the parts do is in the other folders. Begin with `app.py`, which reads top to bottom; `settings.py` has every
setting.
"""
