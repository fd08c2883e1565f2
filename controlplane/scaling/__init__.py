"""Have replicas of versions run: how many, how warm, and on one machine which processes.

Here is what one machine and a cluster share: the replicas, how their starts went, what the routes ask of them, and the
changes that a decider hears of. A cluster's pods are in `controlplane/knative`, models and versions in
`controlplane/registry`. Begin with `kpa/autoscaler.py`, then `local/local_actuator.py`.
"""
