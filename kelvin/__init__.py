"""The command `kelvin`, the supervisors behind it, and what all services share.

From the top: `cli`, `doctor`, `supervisor`; below the services `ipc`, `crypto`, `devices`, `telemetry`, `blobstore`,
`spool`, `process`, `contracts`. What one service alone does is in its own package. Importing this one imports nothing
else. Begin with `cli/main.py`, which mounts every command, or `supervisor/installation_supervisor.py`.
"""
