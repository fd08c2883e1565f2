"""Versions on a cluster: their Knative Services are written here, and their pods are watched. Knative scales them.

What an object should look like is decided in `policy/`, without a cluster. Begin with `plane.py`, which `on_cluster.py`
opens. `converge.py` writes objects, `seen_versions.py` tells activators what is seen, `pools.py` has the pods that
versions share, `lease.py` elects the leader.
"""
