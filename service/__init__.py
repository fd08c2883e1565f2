"""What every process of Kelvin does alike: Unix sockets, JSON logs, readiness, drain, lifeline. No product logic.

Begin with `run.py`, which runs a service until it is told to stop, `client.py` for calls between processes, and
`loops.py` for background work.
"""
