"""Count what tenants use: concurrent requests, requests and tokens per minute, monthly budgets; here or in a Redis.

How a request asks for them is in `request/tenant_limits.py`; bounds of queues are in `queue/`.
Begin with `limit_counters.py`.
"""
