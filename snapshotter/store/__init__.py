"""List what a tenant has in the store, read it back verified, and export it.

`push/` writes packs and manifests; `maintenance/` finds faults and frees objects. Begin with `catalog.py`, then
`pack_check.py`.
"""
