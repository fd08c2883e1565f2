"""Messages about usage, bills, spending, the audit log and backups. Pure.

The control plane computes prices and totals. Begin with `usage.py`.
"""
