"""Read chunks from below the host tier: the interface of a source, the check of every chunk, the store as a source.

The NVMe tier is in `nvme/`, other nodes are in `peers/`. Which source is asked when is decided in `fetch/`. Begin with
`source.py`, then `verifier.py` and `store_tier.py`.
"""
