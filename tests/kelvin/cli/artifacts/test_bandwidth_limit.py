"""The bandwidth limit is shared by all senders and paces pieces of a body. The clock is the test's own."""

import threading
from concurrent.futures import ThreadPoolExecutor

from kelvin.cli.artifacts.push_client import PIECE_BYTES, BandwidthLimit


class Clock:
    """A clock that stands still and records the sleeps of several threads."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.waits.append(seconds)


def test_bandwidth_limit_sends_each_piece_when_due() -> None:
    """The body is complete and in order. The bucket's units are used at once, then each piece waits for its time."""
    clock = Clock()
    body = bytes(range(256)) * 1024
    assert b"".join(BandwidthLimit(PIECE_BYTES, lambda: 0.0, clock.sleep).pieces(body)) == body
    assert clock.waits == [0.75, 1.75, 2.75, 3.75]
    assert list(BandwidthLimit(1, lambda: 0.0, clock.sleep).pieces(b"")) == []


def test_threads_share_one_bandwidth_limit() -> None:
    """Four threads wait as long as one would: no two share a slot."""
    clock = Clock()
    bandwidth_limit = BandwidthLimit(PIECE_BYTES, lambda: 0.0, clock.sleep)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: b"".join(bandwidth_limit.pieces(bytes(PIECE_BYTES))), range(16)))
    assert sorted(clock.waits) == [0.75 + number for number in range(16)]
