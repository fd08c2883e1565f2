"""An in-memory buffer of recently committed records, so that the shipper need not read the disk."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from kelvin.spool.frame import HEADER_BYTES, Frame

RECENT_BYTES: Final = 4 * 1024 * 1024


class RecentRecords:
    """A bounded buffer that the committer fills and one reader empties. While full, new records are only on disk."""

    def __init__(self, limit_bytes: int = RECENT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._frames: deque[tuple[int, bytes]] = deque()  # ascending; a gap is on disk
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<RecentRecords records={len(self._frames)} bytes={self._bytes}>"

    def add(self, first: int, frames: Sequence[bytes]) -> None:
        """Add encoded frames with consecutive sequences that are durable now."""
        with self._lock:
            for sequence, frame in enumerate(frames, first):
                if self._bytes + len(frame) > self._limit_bytes:
                    return
                self._frames.append((sequence, frame))
                self._bytes += len(frame)

    def forget(self, last: int) -> None:
        """Drop all records up to sequence `last`."""
        with self._lock:
            while self._frames and self._frames[0][0] <= last:
                self._bytes -= len(self._frames.popleft()[1])

    def records_after(self, sequence: int, max_count: int) -> list[Frame]:
        """Return at most `max_count` records that follow `sequence` without a gap; none if the next one is missing."""
        found: list[Frame] = []
        with self._lock:
            for number, frame in self._frames:
                if number <= sequence:
                    continue
                if number != sequence + 1 or len(found) == max_count:
                    break
                sequence = number
                found.append(Frame(number, frame[HEADER_BYTES:], 0))
        return found

    def check_integrity(self) -> None:
        """Assert that sequences ascend and that the byte count is right. For tests."""
        numbers = [number for number, _ in self._frames]
        assert numbers == sorted(set(numbers)), numbers
        assert self._bytes == sum(len(frame) for _, frame in self._frames) <= self._limit_bytes
