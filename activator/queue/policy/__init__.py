"""Decide which requests may wait, which is next, which are shed, and when a wait or a failure is too long. Pure.
Waiting, waking and refusing are in the parent folder. Begin with `admission.py` and `tenant_fair_queue.py`.
"""
