"""malloc as a restore wants it: one heap, and a part of it that is there before anybody waits for it.

A tokenizer's tables are megabytes in small and in middling pieces. Where each is new to the process, a start waits for
thousands of page faults; glibc also gives back what is freed, and maps what is large anew each time (mallopt(3)).
"""

import ctypes
from typing import Final

KEPT_BYTES: Final = 16 << 20
_LARGE_BYTES: Final = 8 << 20  # from here on it is mapped by itself, and given back when it is freed
_PIECE: Final = 64 << 10  # below glibc's own limit for mappings, whatever that is at the moment
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h

_libc: Final = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


def settle() -> None:
    """In a process without threads, for it and its forks. One heap for all threads: a restore's thread would begin one
    of its own otherwise, where nothing is kept. Where malloc is not glibc's, nothing is done.
    """
    tune = getattr(_libc, "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, 1)
        tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        tune(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def keep(nbytes: int = KEPT_BYTES) -> None:
    """Touch so many bytes of heap, and free them again. They stay backed by memory.

    So a standby's memory includes them from the start, and a restore that uses them does not wait for page faults.
    """
    pieces = [_libc.malloc(_PIECE) for _ in range(nbytes // _PIECE)]
    for piece in pieces:
        if piece:
            ctypes.memset(piece, 0, _PIECE)
    for piece in pieces:
        _libc.free(piece)
