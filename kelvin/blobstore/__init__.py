"""Object storage: one protocol, several kinds of store, wrappers that retry and verify, and the formats of packs.

The meaning of objects is elsewhere: `snapshotter` writes them, `weightcache` reads them. Begin with `blob_store.py`,
the protocol, and `store_factory.py`, which opens a store from its URL.
"""
