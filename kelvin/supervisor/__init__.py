"""Supervisors that start, watch, restart, reap and end the processes of an installation, a pod or an engine.

No caller's request passes through here; only an engine serves the jobs of pushes. `watchdog.py` kills a process that
hangs, by the times in `restart_policy.py`. Begin with
`installation_supervisor.py`, `pod_supervisor.py` or `engine_supervisor.py`: each owns one group of `child_group.py`.
"""
