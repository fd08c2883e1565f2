"""Keep bytes by key: one protocol, stores of several kinds, wrappers that retry and verify; and the layout of packs.

What the objects mean is not known here: `snapshotter` writes them, `weightcache` reads them. Begin with
`blob_store.py`, the protocol, and `store_factory.py`, which opens a store from its URL.
"""
