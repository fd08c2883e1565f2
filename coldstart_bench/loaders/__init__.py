"""Programs that the bench runs as processes of their own.

The floors and the loaders of others import nothing of Kelvin, and the floor is frozen. `ours.py`, `leases.py`,
`first_step.py`, `publish.py` and `fleet_*.py` import what they measure or make. `upstream.py` stands for a control
plane and a replica, and imports contracts. Most programs answer lines of JSON, by `lines.py`.
"""
