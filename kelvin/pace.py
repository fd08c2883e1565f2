"""Bodies sent no faster than a limit allows, by all threads together."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from contracts.bucket import TokenBucket

PIECE_BYTES: Final = 64 << 10
BURST_S: Final = 0.25  # that many seconds' worth may be sent at once


class Pace:
    """Thread-safe. `sleep` may return early where nothing more shall be sent."""

    def __init__(
        self,
        bytes_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._bucket = TokenBucket()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Pace {self._bytes_s} bytes/s>"

    def pieces(self, body: bytes) -> Iterator[bytes]:
        """`body` in order, each piece when it is due."""
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            with self._lock:
                now_s = self._clock()
                self._bucket.take(len(piece), 1 / self._bytes_s, now_s)
                wait_s = self._bucket.wait_s(0, self._bytes_s * BURST_S, 1 / self._bytes_s, now_s)
            if wait_s > 0:
                self._sleep(wait_s)
            yield piece
