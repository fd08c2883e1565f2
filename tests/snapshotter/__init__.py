"""Tests of the snapshotter. These modules stand in for what is around it, the smallest first:

- `models.py`, `tensors_files.py`: what is pushed. `sender.py`: the client's part of a push.
- `bench.py`: the snapshotter's parts without sockets, over a store that can be killed at any call. `gated.py`: the same
  where each step waits to be let through.
- `house.py`: a snapshotter and its control plane (`control.py`) on real sockets, in a thread. `process.py`: a process.
- `planted.py`: a store with one fault. `reader.py`: reads a store without any code that wrote it.
"""
