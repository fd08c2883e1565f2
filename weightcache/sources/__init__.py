"""Read chunks from below the host tier: the interface of a source, the check of every chunk, and the store as a source.

The NVMe tier is in `nvme/`, other nodes are in `peers/`. `fetch/` decides which source is read when. Begin with
`source.py`, then `verifier.py` and `store_tier.py`.
"""
