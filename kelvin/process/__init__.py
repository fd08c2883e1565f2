"""Building blocks of one process: start, settings, logs, loops, readiness, drain, lifeline, files, threads.

Calls to other processes are in `kelvin.ipc`. Begin with `service_lifecycle.py`, which runs a service until it must
stop, and `loops.py` for background work.
"""
