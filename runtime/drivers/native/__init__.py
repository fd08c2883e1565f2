"""Continuous batching over transformers' model definitions, readable in an hour.

`schedule_policy.py` in the parent folder chooses a step's tokens, and `models/` binds models. Begin with `engine.py`.
"""
