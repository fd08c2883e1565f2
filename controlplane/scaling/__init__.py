"""Decide and make the replicas of each version: how many, how warm, and on one machine which processes.

The modules here are shared by one machine and a cluster: replica table, start outcomes, admin changes. A cluster's pods
are in `controlplane/knative`, models and versions in `controlplane/registry`. Begin with `kpa/autoscaler.py`, then
`local/local_actuator.py`.
"""
