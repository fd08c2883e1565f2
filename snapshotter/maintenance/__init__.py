"""Check what is stored, and free what no version needs.

`store/pack_check.py` reads packs back, and `push/` publishes. Begin with `reachability_policy.py`, then `collector.py`
and `fsck.py`.
"""
