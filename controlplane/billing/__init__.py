"""Turn a month's totals into a bill by the price book, close months, and tell activators what tenants have spent.

Totals are stored by `ledger/`, amounts are computed in `ledger/policy/rating.py`. Begin with `billing_report.py`.
"""
