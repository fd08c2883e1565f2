"""Serve the calls of a push: plan, chunks on disk, commit, publication of the version.

What may be pushed is decided in `intake/`. What is stored already is known by `store/`. Begin with `pushes.py`, then
`publisher.py`, whose order of writes is the invariant.
"""
