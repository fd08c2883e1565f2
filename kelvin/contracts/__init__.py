"""Building blocks of all messages: strict JSON, errors, names, numbers, settings, roles. Pure, no I/O.

The messages themselves are in `artifacts`, `serving` and `accounting`. Begin with `wire.py` and `errors.py`.
"""
