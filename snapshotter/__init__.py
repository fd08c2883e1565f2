"""Takes pushed directories in and makes versions of them: refuse, lay out, stage, pack, seal, publish, check.

It runs no model: an engine's standby judges and seals (`jobs.py`). Begin with `pushes.py`; a commit goes on in
`commits.py` and `publish.py`. `collect.py` frees what no version needs, `fsck.py` checks what is stored.
"""
