"""Check a whole ledger: verify its chains, recompute its totals and bills, compare a tenant's accounts.

Checks change nothing. A check reads every row, so it runs in a process of its own. Begin with `check_runner.py`, which
starts `check_program.py`.
"""
