"""Bodies sent no faster than a limit allows, by all threads together. How much that is, `policy.rate` says."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kelvin.policy.rate import Bucket, take

PIECE_BYTES: Final = 64 << 10


class Pace:
    """Thread-safe. `sleep` may return early where nothing more shall be sent."""

    def __init__(
        self,
        bytes_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bucket = Bucket(bytes_s)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Pace {self._bucket.bytes_s:.0f} bytes/s>"

    def pieces(self, body: bytes) -> Iterator[bytes]:
        """`body` in order, each piece when it is due."""
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            with self._lock:
                self._bucket, wait_s = take(self._bucket, len(piece), self._clock())
            if wait_s > 0:
                self._sleep(wait_s)
            yield piece
