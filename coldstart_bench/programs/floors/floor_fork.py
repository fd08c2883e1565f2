"""The frozen floor of a new process: fork one that has imported torch, until the child has run an instruction.

A line on stdin is one fork; its answer {"seconds", "bytes": 0}. At most 60 lines, imports nothing of Kelvin. Whoever
changes it writes a design note with both figures.
"""

import gc
import json
import os
import sys
import time

import torch

torch.set_num_threads(1)
gc.freeze()
print("ready", flush=True)
for _ in sys.stdin:
    read, write = os.pipe()
    began = time.perf_counter()
    if (child := os.fork()) == 0:
        os.write(write, b"x")
        os._exit(0)
    os.read(read, 1)
    seconds = time.perf_counter() - began
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    print(json.dumps({"seconds": seconds, "bytes": 0}), flush=True)
