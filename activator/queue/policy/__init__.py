"""Decide who may wait, who is next, who is shed, and when a wait or a failure is too long. Pure.

Waiting, waking and refusing are one folder up.
Begin with `admission.py` and `tenant_fair_queue.py`.
"""
