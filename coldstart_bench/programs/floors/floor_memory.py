"""The frozen floors of memory: memcpy into recycled huge pages, a touch of each mapped page, BLAKE3 on one core.

A line of JSON on stdin, {"do": "memcpy" | "touch" | "hash", "bytes": n, "files": […]}, is one measurement; its answer
{"seconds", "bytes"}. At most 60 lines, imports nothing of Kelvin. Whoever changes it writes a design note with both
figures.
"""

import ctypes
import json
import mmap
import os
import sys
import time

from blake3 import blake3

STEP, HUGE, ARENA, HUGEPAGE, POPULATE_WRITE, COLLAPSE = 8 << 20, 2 << 20, 256 << 20, 14, 23, 25
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
hold = libc.mmap(None, 2 * ARENA + HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
base = -(-hold // HUGE) * HUGE  # the first half is copied from, the second into
for advice in (HUGEPAGE, POPULATE_WRITE, COLLAPSE):
    libc.madvise(base, 2 * ARENA, advice)


def touch(path: str) -> None:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
        view[::4096] as touched,
    ):
        touched.tobytes()


def measure(do: str, bytes: int, files: list[str]) -> dict[str, object]:
    total = sum(os.path.getsize(path) for path in files) if do == "touch" else bytes
    began = time.perf_counter()
    if do == "touch":
        for path in files:
            touch(path)
    for at in range(0, 0 if do == "touch" else total, STEP):
        place, length = base + at % ARENA, min(STEP, total - at)
        if do == "memcpy":
            ctypes.memmove(place + ARENA, place, length)
        else:
            blake3(memoryview((ctypes.c_char * length).from_address(place)).cast("B"), max_threads=1).digest()
    return {"seconds": time.perf_counter() - began, "bytes": total}


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(json.dumps(measure(**json.loads(line))), flush=True)
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
