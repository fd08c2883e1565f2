"""Limit the memory of a process that runs a tenant's model, and configure its heap for fast restores.

A model is untrusted: its template, tokenizer or graph may need more memory than the machine has. This process must then
fail or be killed. The cache agent must survive, because all models of the machine share its memory.

All threads share one malloc heap, a part of which is touched in advance. A tokenizer's tables are megabytes of small
and medium allocations. On fresh memory, a start would wait for thousands of page faults. By default glibc also returns
freed memory to the kernel and maps each large allocation separately (mallopt(3)).
"""

import ctypes
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

SPARE_BYTES: Final = 4 << 30  # in addition to weights and KV cache; requests use a small part of it
_OOM_SCORE_ADJ: Final = 500  # of 1000; the cache agent has the default, 0


def raise_oom_score(process: Path = Path("/proc/self")) -> None:
    """Make the kernel's OOM killer prefer this process. Never lowers a score."""
    score = process / "oom_score_adj"
    with suppress(OSError):  # some sandboxes lack this file
        if int(score.read_text()) < _OOM_SCORE_ADJ:
            score.write_text(str(_OOM_SCORE_ADJ))


def limit_memory(growth_bytes: int) -> None:
    """Limit how much this process's private memory may still grow. Beyond that, allocations fail (MemoryError in
    Python). Shared memory, such as weights, doesn't count.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _data_bytes() -> int:
    """Return the bytes that the kernel counts against RLIMIT_DATA: private writable memory, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


PREFAULTED_BYTES: Final = 16 << 20
_LARGE_BYTES: Final = 8 << 20  # from this size, an allocation gets its own mapping and is returned when freed
_PIECE: Final = 64 << 10  # below glibc's dynamic mmap threshold
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h

_libc: Final = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


def configure_heap() -> None:
    """Configure malloc for this process and its forks: one arena for all threads, and fewer mappings and trims.

    Call it before any thread exists. Otherwise the restore's thread gets its own arena, whose pages were never touched.
    glibc only.
    """
    tune = getattr(_libc, "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, 1)
        tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        tune(_M_TRIM_THRESHOLD, 2 * PREFAULTED_BYTES)


def prefault_heap() -> None:
    """Touch PREFAULTED_BYTES of heap and free them again. They stay backed by memory.

    A standby's memory therefore includes them from the start, and a restore that uses them has no page faults.
    """
    pieces = [_libc.malloc(_PIECE) for _ in range(PREFAULTED_BYTES // _PIECE)]
    for piece in pieces:
        if piece:
            ctypes.memset(piece, 0, _PIECE)
    for piece in pieces:
        _libc.free(piece)
