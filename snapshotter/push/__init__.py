"""Serve the calls of a push: plan, chunks on disk, commit, publication of the version.

`intake/` decides what may be pushed, and `store/` knows what is stored already. Begin with `pushes.py`, then
`publisher.py`, whose order of writes is the invariant.
"""
