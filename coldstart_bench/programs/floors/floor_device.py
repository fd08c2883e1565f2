"""The frozen floor of a device: copies from pinned memory to it, one stream, until all bytes are there.

A line of JSON on stdin, {"bytes": n}, is one measurement; its answer {"seconds", "bytes"}, or {"error"} where there is
no device. At most 60 lines, imports nothing of Kelvin. Whoever changes it writes a design note with both figures.
"""

import json
import sys
import time

import torch

STEP, RING = 32 << 20, 256 << 20


def measure(total: int) -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"error": "no CUDA device"}
    device = torch.device("cuda", 0)
    ring = torch.empty(RING, dtype=torch.uint8, pin_memory=True)
    arena = torch.empty(total, dtype=torch.uint8, device=device)
    arena.zero_()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for at in range(0, total, STEP):
        length, place = min(STEP, total - at), at % RING
        arena[at : at + length].copy_(ring[place : place + length], non_blocking=True)
    torch.cuda.synchronize(device)
    return {"seconds": time.perf_counter() - began, "bytes": total}


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(json.dumps(measure(json.loads(line)["bytes"])), flush=True)
    except (RuntimeError, AssertionError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
