"""Store usage records, each once and chained, with the totals that bills are made of.

Prices and bills are in `billing/`; the check of a whole ledger is in `ledger_check/`. Begin with `usage_ledger.py`.
"""
