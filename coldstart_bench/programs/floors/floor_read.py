"""The frozen floor of reading: files into recycled huge pages, past the page cache or out of it, by so many threads.

A line of JSON on stdin, {"files": […], "threads": 2, "direct": true}, is one reading; its answer {"seconds", "bytes"}.
At most 60 lines, imports nothing of Kelvin. Whoever changes it writes a design note with both figures.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator

STEP, HUGE, ARENA, HUGEPAGE, POPULATE_WRITE, COLLAPSE = 8 << 20, 2 << 20, 256 << 20, 14, 23, 25
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
hold = libc.mmap(None, ARENA + HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
base = -(-hold // HUGE) * HUGE
for advice in (HUGEPAGE, POPULATE_WRITE, COLLAPSE):
    libc.madvise(base, ARENA, advice)


def read(pieces: Iterator[tuple[int, tuple[int, int, int]]], lock: threading.Lock, faults: list[str]) -> None:
    while not faults:
        with lock:
            number, (fd, at, length) = next(pieces, (0, (-1, 0, 0)))
        if fd < 0:
            return
        room = (ctypes.c_char * (-(-length // 4096) * 4096)).from_address(base + number * STEP % ARENA)
        if (count := os.preadv(fd, [room], at)) != length:
            faults.append(f"{count} of {length} bytes")


def measure(files: list[str], threads: int, direct: bool) -> dict[str, object]:
    descriptors = [os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in files]
    sizes = {fd: os.fstat(fd).st_size for fd in descriptors}
    pieces = [(fd, at, min(STEP, size - at)) for fd, size in sizes.items() for at in range(0, size, STEP)]
    shared, lock, faults = enumerate(pieces), threading.Lock(), list[str]()
    readers = [threading.Thread(target=read, args=(shared, lock, faults)) for _ in range(threads)]
    began = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.perf_counter() - began
    for fd in descriptors:
        os.close(fd)
    return {"error": faults[0]} if faults else {"seconds": seconds, "bytes": sum(sizes.values())}


print("ready", flush=True)
for line in sys.stdin:
    try:
        print(json.dumps(measure(**json.loads(line))), flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
