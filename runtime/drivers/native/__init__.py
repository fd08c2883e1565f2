"""Continuous batching over transformers' model definitions, readable in an hour.

Which tokens a step computes is `schedule_policy.py`'s in the folder above; models are bound by `models/`. Begin with
`engine.py`.
"""
