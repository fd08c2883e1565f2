"""What exists, what should run, and what it cost: registry, scaling, ledger, admin API.

Model bytes are elsewhere: `snapshotter` takes them in, `weightcache` serves them. Begin with `app.py`, which opens the
database and puts together either `one_machine.py` or `on_cluster.py`. `registry.py` has models and versions,
`autoscaler.py` decides how many replicas run on one machine (on a cluster Knative does), `scaling/` starts them,
`ledger.py` enters usage records.
"""
