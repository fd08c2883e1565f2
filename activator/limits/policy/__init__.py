"""Decide what a tenant may still use: token buckets, budgets, and parts of both that several activators lease. Pure.
Redis and tasks are in the parent folder. Begin with `gcra.py` for one activator, `held_quota.py` for several.
"""
