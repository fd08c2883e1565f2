"""Tests of the runtime. These modules stand in for its surroundings, the smallest first:

- `versions.py`, `vocabularies.py`: small versions and tokenizers, made in memory.
- `tiny_decoders.py`: random models of every family, and engines over them.
- `driving.py`: steps an engine, and records its thread's events. `restoring.py`: restores in this process.
- `scripted_engine.py`: an engine that follows a script. `fakes.py`: a replica around it on a real socket.
- `processes.py`: a zygote and a cache agent as real processes. `in_process.py`: calls every route of a runtime.
"""
