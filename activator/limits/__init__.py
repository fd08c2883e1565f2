"""Count what tenants use, in this process or in Redis: concurrent requests, rates per minute, monthly budgets.
`request/tenant_limits.py` checks a request against them; queue limits are in `queue/`. Begin with `rate_limits.py`.
"""
