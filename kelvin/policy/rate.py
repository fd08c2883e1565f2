"""A limit on bytes per second: a token bucket, and how many senders a limit is worth. Time is an argument.

The bucket is kept as one number (the virtual scheduling form of the generic cell rate algorithm, ITU-T I.371): until
when the inflow pays for what was taken. It is full once that lies `burst_s` back.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

_RATE: Final = re.compile(r"([0-9]{1,15})([KMGkmg]?)")
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# Slower than that no chunk arrives within the time that the snapshotter gives it.
LEAST_BYTES_S: Final = 64 << 10
MOST_BYTES_S: Final = 1 << 50  # no wire is faster
BURST_S: Final = 0.25
# A chunk that is cut is sent again from its start: none should be on its way for longer.
CHUNK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """`bytes_s` flow in; what was taken is paid for at `paid_at` (seconds of the caller's clock)."""

    bytes_s: float
    paid_at: float = float("-inf")
    burst_s: float = BURST_S


def take(bucket: Bucket, nbytes: int, now: float) -> tuple[Bucket, float]:
    """The bucket after `nbytes` were taken, and the seconds to wait before they may be sent.

    In any time t at most `bytes_s * (t + burst_s)` bytes are let through, and one piece that is larger than a burst.
    """
    paid_at = max(bucket.paid_at, now - bucket.burst_s) + nbytes / bucket.bytes_s
    return replace(bucket, paid_at=paid_at), max(0.0, paid_at - now)


def parse_rate(text: str) -> int:
    """Bytes per second of `10M`, as curl writes it: K, M and G are 1024, 1024² and 1024³. Raises ValueError."""
    matched = _RATE.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text[:40]!r}: must be a whole number of bytes a second, with K, M or G")
    rate = int(matched[1]) * _UNITS[matched[2].lower()]
    if rate < LEAST_BYTES_S:
        raise ValueError(f"{text[:40]!r}: must be 64K or more")
    if rate > MOST_BYTES_S:
        raise ValueError(f"{text[:40]!r}: must be {MOST_BYTES_S >> 30}G or less")
    return rate


def senders(parallel: int, bytes_s: int | None, chunk_bytes: int) -> int:
    """As many of `parallel` as keep each chunk on its way for at most `CHUNK_S`; one at least."""
    if bytes_s is None or chunk_bytes == 0:
        return parallel
    return max(1, min(parallel, int(bytes_s * CHUNK_S // chunk_bytes)))
