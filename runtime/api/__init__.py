"""The routes of a replica: inference requests, control orders, probes and metrics.

What a request means is `surface/`'s, whether the replica takes one is `lifecycle/replica.py`'s. Begin with
`inference_api.py`; `delivery.py` writes its answers, `orphan_records.py` records requests whose activator is gone.
"""
