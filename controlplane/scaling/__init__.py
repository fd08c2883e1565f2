"""How a decided number of replicas comes about: processes of one machine here, pods of a cluster in `knative/`.

How many there should be is decided in `autoscaler.py` and `policy/`, or by Knative. Begin with `local.py`, the actuator
of one machine: its standbys come from `pool.py`, its processes from `fleet.py`.
"""
