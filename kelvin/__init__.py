"""The command `kelvin`, the supervisors of its processes, and the code that all services share.

The order of imports is `cli`, `doctor`, `supervisor`, then the layers that services use: `ipc`, `crypto`, `devices`,
`telemetry`, `blobstore`, `spool`, `process`, `contracts`. Code of a single service is in that service's own package.
Begin with `cli/main.py`, which mounts every command, or with `supervisor/installation_supervisor.py`. Importing this
package imports nothing else.
"""
