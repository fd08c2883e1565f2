"""Tests of the runtime. These modules stand in for its surroundings, the smallest first:

- `versions.py`, `vocabularies.py`: small versions and tokenizers, made in memory.
- `driving.py`: steps an engine, and records its thread's events. `restoring.py`: restores in this process.
- `fakes.py`: an engine that follows a script, and a replica around it on a real socket.
- `processes.py`: a zygote and a cache agent as real processes. `in_process.py`: calls every route of a runtime.
"""
