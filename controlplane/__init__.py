"""Decide what exists, what runs and what it costs: the registry, the autoscaler, the ledger and the admin API.

Model bytes are elsewhere: `snapshotter` stores them, `weightcache` serves them. `activator` serves callers' requests.
Begin with `app/app.py`, which opens the database and builds the control plane on one of two backends:
`app/machine_backend.py` (processes of this machine, `scaling/`) or `app/cluster_backend.py` (Knative, `knative/`).
"""
