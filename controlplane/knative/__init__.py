"""Run versions on a cluster as Knative Services, and do what Model and Tenant objects declare.

Which replicas one machine runs is in `scaling/local`; who leads is in `controlplane/app`. Begin with
`knative_controller.py`, which needs `services/` and `pools/`; all calls of the cluster are in `apply/`.
"""
