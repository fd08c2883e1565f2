"""Hold chunks in sealed shared memory: slabs, what lies in them, and which processes have them mapped.

Chunks are brought here by `fetch/` and lent by `app/lease_server.py`. Begin with `arena.py`, the tier;
`resident_version.py` is a version as it lies here.
"""
