"""Hold chunks in sealed shared memory: slabs, the chunks in them, and the processes that map them.

`fetch/` loads chunks into this tier, `app/lease_server.py` lends them. Begin with `arena.py`, the tier;
`resident_version.py` is a version in this tier.
"""
