"""Talk to an API server: apply, delete and watch objects, and keep them in their wanted state.

The wanted state is decided in `knative/policy`. Begin with `cluster.py`, the interface for other packages, then
`applier.py`. Only `kubernetes_client.py` and `transport.py` use the `kubernetes` library.
"""
