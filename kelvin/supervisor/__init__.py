"""Start, watch, restart, reap and end the processes of an installation, a pod or an engine.

No request of a caller passes through here; an engine serves the jobs of pushes. Begin with
`installation_supervisor.py`, `pod_supervisor.py` or `engine_supervisor.py`: each has one group of `child_group.py`.
"""
