"""The life of a replica: its states, restore, sleep and wake, sealing of drafts, metering.

How its process starts is `app/`'s. How weights become a module is `models/`'s. Begin with `replica.py`, the
transition table; `version_restore.py` makes a version ready, `sealing_jobs.py` proves a draft.
"""
