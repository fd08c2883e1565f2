"""Decide which usage record is charged, in which month, and what it costs. Pure: integers only, no storage.

Begin with `booking.py` and `rating.py`. Differences between accounts are named in `discrepancies.py`.
"""
