"""The routes of a replica: inference requests, control orders, probes and metrics.

`surface/` decodes requests, and `lifecycle/replica.py` decides whether the replica accepts one. Begin with
`inference_api.py`; `delivery.py` writes responses, `orphan_records.py` records requests whose activator is gone.
"""
