"""Know what a tenant has in the store, read it back checked, and give it out.

Writing packs and manifests is done in `push/`, finding faults and freeing objects in `maintenance/`. Begin with
`catalog.py`, then `pack_check.py`.
"""
