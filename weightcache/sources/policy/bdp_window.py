"""Measure the throughput of a source, and limit the bytes in flight at the store (bandwidth-delay product).

Pure: callers pass the time.

The measure is the throughput of all transfers together, not of one. Concurrent transfers share the connection, so
the speed of one says little. The rate of one transfer times the average number of transfers at once gives the total
(Little, 1961). Unlike bytes over time, this does not depend on whether transfers end one by one or together.

At the store, half a second's worth of bytes may be in flight. Bytes in flight can't be reordered. On a slow connection,
a fixed limit in bytes would make late requests wait for seconds and put early ones far ahead. By Little's law, bytes in
flight are the rate times the wait, so the measured rate and a target wait give the limit.
"""

from dataclasses import dataclass
from typing import Final

TARGET_WAIT_S: Final = 0.5  # many times a store's latency: less would leave the connection idle
RANGE_BYTES: Final = 4 << 20  # half a chunk: one connection to S3 brings about 0.1 GB/s
LEAST_RANGE_BYTES: Final = 1 << 20  # each range is a request, with its latency and its price
PARALLEL_RANGES: Final = 16  # if fewer ranges than this fit the window, each is made shorter
FIRST_BYTES: Final = 8 << 20  # limit until the rate is known
LEAST_BYTES: Final = 4 << 20  # keeps any connection busy
MIN_SAMPLE_BYTES: Final = 256 << 10  # shorter reads measure latency instead


NEWEST_WEIGHT: Final = 0.3  # weight of the newest transfer in the moving average


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer that is still running."""

    began_at_s: float
    transfer_seconds: float  # the meter's sum of (running transfers x seconds) when it began


@dataclass(slots=True)
class ThroughputMeter:
    """Moving average of bytes per second while transfers run; None before the first."""

    bytes_per_s: float | None = None
    _transfers: int = 0
    _transfer_seconds: float = 0.0
    _updated_at_s: float = 0.0

    def begin(self, now: float) -> Transfer:
        """Count a transfer that starts now."""
        self._update(now)
        self._transfers += 1
        return Transfer(now, self._transfer_seconds)

    def end(self, transfer: Transfer, moved_bytes: int, now: float) -> None:
        """End a transfer of `moved_bytes`. 0 bytes do not count: a refusal is not a slow transfer."""
        self._update(now)
        self._transfers -= 1
        took_s = now - transfer.began_at_s
        if moved_bytes and took_s > 0:
            at_once = (self._transfer_seconds - transfer.transfer_seconds) / took_s  # average, including this transfer
            sample = moved_bytes / took_s * at_once
            if self.bytes_per_s is not None:
                sample = NEWEST_WEIGHT * sample + (1 - NEWEST_WEIGHT) * self.bytes_per_s
            self.bytes_per_s = sample

    def _update(self, now: float) -> None:
        self._transfer_seconds += self._transfers * (now - self._updated_at_s)
        self._updated_at_s = now


class BdpWindow:
    """A `ReadLimit` of at most `at_once` ranges. Call `begin` and `end` for each read."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._meter = ThroughputMeter()

    def __repr__(self) -> str:
        return f"<BdpWindow window={self.window_bytes} range={self.range_bytes} rate={self.bytes_per_s}>"

    @property
    def bytes_per_s(self) -> float | None:
        """Return the bytes per second of all reads together; None before the first."""
        return self._meter.bytes_per_s

    @property
    def window_bytes(self) -> int:
        """Return the limit of bytes in flight."""
        wanted = FIRST_BYTES if self.bytes_per_s is None else max(LEAST_BYTES, self.bytes_per_s * TARGET_WAIT_S)
        return int(min(wanted, self.at_once * RANGE_BYTES))

    @property
    def range_bytes(self) -> int:
        """Return the longest range of one read: a power of two, so that reads of one size can be compared."""
        fitting = self.window_bytes // min(PARALLEL_RANGES, self.at_once)
        return min(RANGE_BYTES, max(LEAST_RANGE_BYTES, 1 << fitting.bit_length() - 1))

    def next_part_bytes(self, running_parts: int, running_bytes: int, remaining_bytes: int) -> int | None:
        """Return how many of the `remaining_bytes` may start now, as `ReadLimit` specifies."""
        size = min(remaining_bytes, self.range_bytes)
        if running_parts >= self.at_once or (running_parts and running_bytes + size > self.window_bytes):
            return None
        return size

    def begin(self, now: float) -> Transfer:
        """Count a read that starts now."""
        return self._meter.begin(now)

    def end(self, read: Transfer, moved_bytes: int, now: float) -> None:
        """End a read of `moved_bytes`; 0: it failed."""
        self._meter.end(read, moved_bytes if moved_bytes >= MIN_SAMPLE_BYTES else 0, now)
