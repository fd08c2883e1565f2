"""The life of a replica: its states, restore, sleep and wake, the sealing of drafts, metering.

`app/` starts the process, `models/` builds modules from weights, and `surface/served_version.py` defines a version that
is ready. Begin with `replica.py`, the transition table; `version_restore.py` makes a version ready, `sealing_jobs.py`
verifies a draft. `credit_policy.py` divides streams among activators, and `gpu_watch.py` drains a replica with a broken
GPU.
"""
