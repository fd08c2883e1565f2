"""Return freed memory to the system (malloc_trim(3)).

A TLS handshake takes some 300 KiB in small pieces, which glibc keeps when they are freed. Without trimming, the process
would stay at its peak size after a burst of aborted handshakes.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from kelvin.process.procfs import resident_bytes

CHECK_S: Final = 10.0
GROWN_BYTES: Final = 32 << 20
MAX_PAUSE: Final = 64  # checks between two trims


def trim() -> None:
    """Return free heap to the system. Takes a few milliseconds for 100 MiB; does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


class HeapTrimmer:
    """Trims the heap when the process has grown by GROWN_BYTES since it was smallest, or since the last trim.

    A trim during a burst finds most memory in use. So trims are repeated while the process stays that large, after 1,
    2, 4, ... and at most MAX_PAUSE checks.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim) -> None:
        self._resident = resident
        self._trim = trim
        self._smallest_bytes = self._after_trim = resident()
        self._pause = self._checks_left = 1

    def __repr__(self) -> str:
        return f"<HeapTrimmer least={self._smallest_bytes >> 20} MiB>"

    def trim_if_grown(self) -> None:
        """Trim if the process has grown, or if it stayed large after the last trim."""
        resident = self._resident()
        self._smallest_bytes = min(self._smallest_bytes, resident)
        if resident <= self._smallest_bytes + GROWN_BYTES:
            return
        self._checks_left -= 1
        if resident > self._after_trim + GROWN_BYTES:
            self._pause = 1
        elif self._checks_left > 0:
            return
        self._trim()
        self._after_trim = self._resident()
        self._checks_left, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)

    async def run(self) -> None:
        """Check every CHECK_S seconds until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.trim_if_grown()
