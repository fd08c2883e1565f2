"""Pure decisions about a cluster's objects: what they should be, what they say, whose turn it is.

Nothing here calls a cluster: `apply/`, `services/` and `pools/` do. Begin with `knative_service.py`, a version's
Service, and `apply_steps.py`, what is done to one object.
"""
