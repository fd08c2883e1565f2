"""Decide which model and version a request means, and which replicas suit it. Pure. The state that these decisions read
is in `routing/` and `queue/`. Begin with `traffic_split.py`.
"""
