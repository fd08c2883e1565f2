"""Parse rates and durations, and choose how many parallel senders fit a rate. Pure."""

import re
from typing import Final

_RATE: Final = re.compile(r"([0-9]{1,15})([KMGkmg]?)")
_BYTES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# At a lower rate no chunk arrives within the snapshotter's time limit.
MIN_BYTES_S: Final = 64 << 10
MAX_BYTES_S: Final = 1 << 50  # faster than any network
# An interrupted chunk is sent again from its start, so no chunk should take longer than this.
CHUNK_S: Final = 30.0
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")


def parse_rate(text: str) -> int:
    """Return the bytes per second of `10M`. K, M and G are powers of 1024, as in curl. Raises ValueError."""
    matched = _RATE.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text[:40]!r}: must be a whole number of bytes a second, with K, M or G")
    rate = int(matched[1]) * _BYTES[matched[2].lower()]
    if rate < MIN_BYTES_S:
        raise ValueError(f"{text[:40]!r}: must be 64K or more")
    if rate > MAX_BYTES_S:
        raise ValueError(f"{text[:40]!r}: must be {MAX_BYTES_S >> 30}G or less")
    return rate


def sender_count(parallel: int, bytes_s: int | None, chunk_bytes: int) -> int:
    """Return the largest count up to `parallel` at which each chunk takes at most `CHUNK_S`. At least 1."""
    if bytes_s is None or chunk_bytes == 0:
        return parallel
    return max(1, min(parallel, int(bytes_s * CHUNK_S // chunk_bytes)))


def parse_duration_s(text: str) -> int:
    """Return the whole seconds of `24h`. Raises ValueError with the value and the rule."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]}: must be a whole number and one of s, m, h, d, such as 24h")
    return int(found[1]) * _SECONDS[found[2]]
