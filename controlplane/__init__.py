"""What exists, what should run, and what it cost: the registry, the scaler, the ledger and the admin API.

Model bytes are elsewhere: `snapshotter` takes them in, `weightcache` serves them. Requests of callers go to
`activator`. Begin with `app/app.py`, which opens the database and builds the control plane. It builds one of two
backends: `app/machine_backend.py` (processes of this machine, `scaling/`) or `app/cluster_backend.py` (Knative,
`knative/`).
"""
