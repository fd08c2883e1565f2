"""Decisions of the front door, as pure functions and pure state. Times are arguments, and nothing here does I/O.

`admission.py` decides who may wait, `fair.py` whose turn it is, `retries.py` and `hedge.py` what is sent again,
`budget.py` and `gcra.py` what a tenant may use.
"""
