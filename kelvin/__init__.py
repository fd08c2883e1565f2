"""The command `kelvin`, and the supervisors behind `kelvin up`, `kelvin runtime` and `kelvin engine`.

It talks HTTP to the services. Of their packages it imports only pure `policy`, and from `spool` what ships records; it
starts programs of the control plane as processes. Begin with `main.py`, which mounts every command, or with
`supervisor/up.py`.
"""
