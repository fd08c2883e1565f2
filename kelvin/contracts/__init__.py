"""What all messages are made of: strict JSON, errors, names, numbers, settings, roles. Pure.

Messages themselves are in `artifacts`, `serving` and `accounting`; nothing here does I/O. Begin with `wire.py` and
`errors.py`.
"""
