"""Return freed memory to the system (malloc_trim(3)).

A TLS handshake takes some 300 KiB in small pieces, which glibc keeps when they are freed. Without trimming, the process
would stay at its peak size after a burst of aborted handshakes.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from service.processes import resident_bytes

LOOK_S: Final = 10.0
GROWN_BYTES: Final = 32 << 20


def trim() -> None:
    """Return free heap to the system. Takes a few milliseconds for 100 MiB; does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


class HeapTrimmer:
    """Trims the heap when the process has grown by GROWN_BYTES since it was smallest, or since the last trim."""

    def __init__(self, resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim) -> None:
        self._resident = resident
        self._trim = trim
        self._least = resident()

    def __repr__(self) -> str:
        return f"<HeapTrimmer least={self._least >> 20} MiB>"

    def trim_if_grown(self) -> None:
        """Look once. What remains after a trim is in use, and counts as the new smallest size."""
        resident = self._resident()
        if resident > self._least + GROWN_BYTES:
            self._trim()
            self._least = self._resident()
        else:
            self._least = min(self._least, resident)

    async def run(self) -> None:
        """Look every LOOK_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.trim_if_grown()
