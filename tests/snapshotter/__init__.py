"""Tests of the snapshotter. Helper modules, the smallest first:

- `models.py`, `tensors_files.py`: models to push. `sender.py`: the client's part of a push.
- `bench.py`: the snapshotter's parts without sockets, over a store that can be killed at any call. `gated.py`: the
  same,
  but each step waits until the test opens its gate.
- `house.py`: a snapshotter and its control plane (`control.py`) on real sockets, in a thread. `process.py`: a process.
- `planted.py`: a store with one fault. `reader.py`: reads a store without any code that wrote it.
"""
