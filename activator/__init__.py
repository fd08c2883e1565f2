"""The front door: TLS, HTTP, API keys, routing, the request queue for models at zero, streaming, and usage records.

Replicas compute in `runtime/`. The control plane decides how many replicas there are and keeps the accounts. Begin with
`app/components.py`, which builds everything. A completion passes `http/transports.py`, `http/http1_protocol.py`,
`http/request_response_cycle.py`, `api/front_door.py`, `api/completions.py`, `api/inference_runner.py`,
`api/inference_handler.py`, `request/attempts.py`, `queue/throttler.py` and `upstream/upstream_request.py`. Pure
decisions are in `policy/` folders and `*_policy.py`. State that several activators share (limits, kept answers) is in
`redis_*.py` and `limits/leased_quotas.py`.
"""
