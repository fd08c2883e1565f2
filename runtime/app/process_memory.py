"""The memory of a process that serves or judges a tenant's model: bounded, and its heap as a restore wants it.

A model is untrusted: its template, tokenizer or graph may take more memory than the machine has. Then this process has
to fail or be killed, and not the cache agent, whose memory all models of the machine share.

malloc has one heap, and a part of it that is there before anybody waits for it. A tokenizer's tables are megabytes in
small and in middling pieces. Where each is new to the process, a start waits for thousands of page faults; glibc also
gives back what is freed, and maps what is large anew each time (mallopt(3)).
"""

import ctypes
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

SPARE_BYTES: Final = 4 << 30  # beside weights and KV cache; requests take a small part of it
_OOM_SCORE_ADJ: Final = 500  # of 1000; the cache agent has the default, 0


def raise_oom_score(process: Path = Path("/proc/self")) -> None:
    """Have the kernel's OOM killer choose this process before others. A higher score that is set already stays."""
    score = process / "oom_score_adj"
    with suppress(OSError):  # some sandboxes have no such file
        if int(score.read_text()) < _OOM_SCORE_ADJ:
            score.write_text(str(_OOM_SCORE_ADJ))


def limit_memory(growth_bytes: int) -> None:
    """Limit the growth of this process's private memory. Beyond it allocations fail: MemoryError in Python.

    Shared memory, such as weights, doesn't count.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _data_bytes() -> int:
    """Return what the kernel counts against RLIMIT_DATA: private writable memory, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


PREFAULTED_BYTES: Final = 16 << 20
_LARGE_BYTES: Final = 8 << 20  # from here on it is mapped by itself, and given back when it is freed
_PIECE: Final = 64 << 10  # below glibc's own limit for mappings, whatever that is at the moment
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h

_libc: Final = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


def configure_heap() -> None:
    """In a process without threads, for it and its forks. One heap for all threads: a restore's thread would begin one
    of its own otherwise, where nothing is kept. Where malloc is not glibc's, nothing is done.
    """
    tune = getattr(_libc, "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, 1)
        tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        tune(_M_TRIM_THRESHOLD, 2 * PREFAULTED_BYTES)


def prefault_heap() -> None:
    """Touch PREFAULTED_BYTES of heap, and free them again. They stay backed by memory.

    So a standby's memory includes them from the start, and a restore that uses them does not wait for page faults.
    """
    pieces = [_libc.malloc(_PIECE) for _ in range(PREFAULTED_BYTES // _PIECE)]
    for piece in pieces:
        if piece:
            ctypes.memset(piece, 0, _PIECE)
    for piece in pieces:
        _libc.free(piece)
