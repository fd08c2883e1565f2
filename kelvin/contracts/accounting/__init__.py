"""What is metered and reported: usage, bills, spending, the audit log, backups. Pure.

Prices and totals are the control plane's. Begin with `usage.py`.
"""
