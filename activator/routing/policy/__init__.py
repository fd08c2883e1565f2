"""Decide which model and version a request means. Pure. `affinity.py` is the hash ring by which `queue/` chooses a
replica. The state that these decisions read is in `routing/` and `queue/`. Begin with `version_resolution.py`.
"""
