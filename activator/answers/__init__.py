"""Repeat a response: idempotency keys, the response cache, one run read by several clients, and the answer stores.
Responses that a replica computes are in `request/`. `degradation/` decides when degradation may use a cached answer.
Begin with `idempotency.py`.
"""
