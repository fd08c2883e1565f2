"""Run the replicas of one machine: fork standbys, bind versions, put to sleep, replace, drain, adopt.

How many there should be is decided in `scaling/kpa`; a cluster's pods are in `controlplane/knative`. Begin with
`local_actuator.py`: its standbys come from `standby_pool.py`, its processes from `fleet.py`.
"""
