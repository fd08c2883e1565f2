"""Bytes by key: one protocol, several places that keep them, behaviour added by wrapping; and the layout of packs.

What the objects mean is their users' (`snapshotter` writes them, `weightcache` reads them; keys are in
`contracts/keys.py`). Begin with `store.py`, the protocol, and `factory.py`, which opens a store from its URL.
"""
