"""Run versions on a cluster as Knative Services, and reconcile Model and Tenant objects.

Replicas of one machine are in `scaling/local`; leader election is in `controlplane/app`. Begin with
`knative_controller.py`, which needs `services/` and `pools/`. All calls to the cluster are in `apply/`.
"""
