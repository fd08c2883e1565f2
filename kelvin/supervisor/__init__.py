"""Start, watch, restart, reap and end the processes of an installation, a pod or an engine.

No caller's request passes through here; `engine.py` serves the jobs of pushes. Begin with `up.py` for an installation,
`pod.py` for `kelvin runtime`, and `engine.py` for `kelvin engine`. `graves.py` turns the deaths of replicas into
lifetime records for the bill.
"""
