"""Tests of the weight cache. These modules stand in for what is around it, the smallest first:

- `kit.py`: versions made from a seed, a store of them, an open cache (`cached`), an agent in a thread (`running`).
- `peer_kit.py`: agents in threads that know one another. `peer_nodes.py`: fetchers of many nodes, on virtual time.
- `processes.py`: agents, and processes that lease from them, as real processes.
- `disks.py`: what a disk may refuse. `injection.py`, `flips.py`: damage. `throttled_s3.py`: a slow bucket.
- `lanes.py`: a device made of this process's memory.
"""
