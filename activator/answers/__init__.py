"""Give a response again: idempotency keys, the response cache, one run that several clients read, and their stores.

Responses that a replica computes are in `request/`; when a model's degradation policy uses the cache is in
`degradation/`. Begin with `idempotency.py`.
"""
