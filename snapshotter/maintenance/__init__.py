"""Check what is stored, and free what no version needs.

Reading a pack back is in `store/pack_check.py`; publishing is in `push/`. Begin with `reachability_policy.py`, then
`collector.py` and `fsck.py`.
"""
