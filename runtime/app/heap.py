"""Configure a process's heap for fast restores.

All threads share one malloc heap, a part of which is touched in advance. A tokenizer's tables are megabytes of small
and medium allocations. On fresh memory, a start would wait for thousands of page faults. By default glibc also returns
freed memory to the kernel and maps each large allocation separately (mallopt(3)).
"""

import ctypes
from typing import Final

PREFAULTED_BYTES: Final = 16 << 20
_LARGE_BYTES: Final = 8 << 20  # from this size, an allocation gets its own mapping and is returned when freed
_BLOCK_BYTES: Final = 64 << 10  # below glibc's dynamic mmap threshold
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
    blocks = [_libc.malloc(_BLOCK_BYTES) for _ in range(PREFAULTED_BYTES // _BLOCK_BYTES)]
    for block in blocks:
        if block:
            ctypes.memset(block, 0, _BLOCK_BYTES)
    for block in blocks:
        _libc.free(block)
