"""How fast a source moves bytes, measured as they move, and how much may be under way at the store.

Pure: the clock is the caller's.

What counts is what a source does for us altogether, not the rate of one transfer: eight at once are each slow, and the
ninth waits for them. A transfer's own rate, times how many there were at once, is that of all of them (Little, 1961);
unlike bytes over time it does not matter whether they end one by one or together.

At the store may be under way what its line moves in half a second. What is under way is in nobody's hands any more: on
a slow line a bound in bytes alone keeps whoever comes late waiting for seconds, and whoever came first far ahead. By
the same law what is under way is the rate times the time that each waits, so that the rate and the time that one should
wait say how much that is.
"""

from dataclasses import dataclass
from typing import Final

TARGET_WAIT_S: Final = 0.5  # many times what a store needs to begin an answer: less would leave its line idle
RANGE_BYTES: Final = 4 << 20  # half a chunk: one connection to S3 brings some 0.1 GB/s
LEAST_RANGE_BYTES: Final = 1 << 20  # each is a request, that waits and is paid for
PARALLEL_RANGES: Final = 16  # ranges; before they are fewer they get shorter
FIRST_BYTES: Final = 8 << 20  # until the rate is known
LEAST_BYTES: Final = 4 << 20  # keeps any line busy
MIN_SAMPLE_BYTES: Final = 256 << 10  # a shorter read tells of the way there and back


NEWEST_WEIGHT: Final = 0.3  # of the newest transfer; the rest is what was known before


@dataclass(frozen=True, slots=True)
class Transfer:
    """One that is under way."""

    began_at_s: float
    transfer_seconds: float  # transfers under way, times seconds, by then


@dataclass(slots=True)
class ThroughputMeter:
    """Bytes per second while something is under way, as a moving average; None before the first."""

    rate: float | None = None
    _transfers: int = 0
    _transfer_seconds: float = 0.0
    _updated_at_s: float = 0.0

    def begin(self, now: float) -> Transfer:
        """A transfer was asked for."""
        self._update(now)
        self._transfers += 1
        return Transfer(now, self._transfer_seconds)

    def end(self, transfer: Transfer, moved: int, now: float) -> None:
        """It is over, and so many bytes came; 0 teaches nothing: a refusal is not a slow transfer."""
        self._update(now)
        self._transfers -= 1
        took_s = now - transfer.began_at_s
        if moved and took_s > 0:
            at_once = (self._transfer_seconds - transfer.transfer_seconds) / took_s  # on average, itself included
            sample = moved / took_s * at_once
            self.rate = sample if self.rate is None else NEWEST_WEIGHT * sample + (1 - NEWEST_WEIGHT) * self.rate

    def _update(self, now: float) -> None:
        self._transfer_seconds += self._transfers * (now - self._updated_at_s)
        self._updated_at_s = now


class BdpWindow:
    """At most `at_once` ranges. Call `begin` and `end` for each read."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._pace = ThroughputMeter()

    def __repr__(self) -> str:
        return f"<Line window={self.window} range={self.range_bytes} rate={self.rate}>"

    @property
    def rate(self) -> float | None:
        """Bytes per second, of all reads together; None before the first."""
        return self._pace.rate

    @property
    def window(self) -> int:
        """Bytes that may be under way."""
        wanted = FIRST_BYTES if self.rate is None else max(LEAST_BYTES, self.rate * TARGET_WAIT_S)
        return int(min(wanted, self.at_once * RANGE_BYTES))

    @property
    def range_bytes(self) -> int:
        """Of one read at most: a power of two, so that reads of a size can be compared."""
        fitting = self.window // min(PARALLEL_RANGES, self.at_once)
        return min(RANGE_BYTES, max(LEAST_RANGE_BYTES, 1 << fitting.bit_length() - 1))

    def part(self, parts: int, nbytes: int, left: int) -> int | None:
        """See `ReadLimit`."""
        size = min(left, self.range_bytes)
        if parts >= self.at_once or (parts and nbytes + size > self.window):
            return None
        return size

    def begin(self, now: float) -> Transfer:
        """A read was asked for."""
        return self._pace.begin(now)

    def end(self, read: Transfer, moved: int, now: float) -> None:
        """It brought so many bytes; 0: it failed."""
        self._pace.end(read, moved if moved >= MIN_SAMPLE_BYTES else 0, now)
