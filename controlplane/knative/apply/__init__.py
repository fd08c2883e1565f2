"""Talk to an API server: apply, delete and watch objects, and keep them as they are wanted.

What an object should look like is decided in `knative/policy`. Begin with `cluster.py`, which is what others call, then
`applier.py`; only `kubernetes_client.py` and `transport.py` know the `kubernetes` library.
"""
