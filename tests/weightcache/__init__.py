"""Tests of the weight cache. Helper modules:

- `kit.py`: versions made from a seed, a store of them, an open cache (`open_test_cache`), an agent in a
  thread (`run_agent`).
- `peer_kit.py`: agents in threads that are peers. `peer_nodes.py`: fetchers of many nodes, on virtual time.
- `processes.py`: agents, and processes that lease from them, as real processes.
- `disks.py`: disks that refuse calls. `injection.py`, `flips.py`: damage. `throttled_s3.py`: a slow bucket.
- `lanes.py`: a device made of this process's memory.
"""
