"""The life of a replica: its states, restore, sleep and wake, the sealing of drafts, metering.

`app/` starts the process, and `models/` builds modules from weights. Begin with `replica.py`, the transition table;
`version_restore.py` makes a version ready, `sealing_jobs.py` verifies a draft. `credit_policy.py` divides streams among
activators, and `gpu_watch.py` drains a replica with a broken GPU.
"""
