"""Decisions about a cluster's objects: their wanted state, the meaning of their status, the order of a roll-out. Pure.

Nothing here calls a cluster: `apply/`, `services/` and `pools/` do. Begin with `knative_service.py` (the Service of a
version) and `apply_steps.py` (the next step for one object).
"""
