"""Decide which usage record is charged, in which month, and what it costs. Pure: integers only, no storage.

Begin with `booking.py` and `rating.py`. What differs between accounts is named in `discrepancies.py`.
"""
