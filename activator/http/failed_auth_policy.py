"""What a key that is not good costs the one who shows it. A good key is never asked about: see design note 9.

Per source a token bucket: up to `burst` in a row cost nothing (somebody pasted the wrong key); each
one beyond is held back before it is answered, twice as long as the one before, up to `longest_s`. Sources are bounded
in number: the one that was quiet for longest is forgotten, which only makes it cheaper for that one.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from kelvin.contracts.token_bucket import TokenBucket


@dataclass(frozen=True, slots=True)
class FailedAuthLimits:
    """Failures and seconds."""

    burst: int = 20
    leak_s: float = 3.0  # for one failure to be forgotten
    first_s: float = 0.1
    longest_s: float = 5.0
    beyond: int = 20  # failures over the burst that are counted at most: after a flood the source recovers
    sources: int = 4096
    held: int = 1024  # answers held back at once, of all sources
    held_of_one: int = 256


@dataclass(frozen=True, slots=True)
class Penalty:
    """Hold the answer for `hold_s`, and say that another failure is free after `retry_after_s`."""

    hold_s: float
    retry_after_s: float
    is_first: bool  # the source has just used up its burst


class FailedAuthLimiter:
    """All sources' buckets. Times are seconds of one clock that never steps back."""

    def __init__(self, limits: FailedAuthLimits | None = None) -> None:
        self.limits = limits or FailedAuthLimits()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # the one that failed last comes last
        self._held: dict[str, int] = {}
        self.total_held = 0

    def __repr__(self) -> str:
        return f"<FailedAuthLimiter sources={len(self._buckets)} held={self.total_held}>"

    def failed(self, source: str, now_s: float) -> Penalty | None:
        """Count a failure. None within the burst."""
        limits = self.limits
        bucket = self._buckets.pop(source, None) or TokenBucket()
        before = bucket.missing(limits.leak_s, now_s)
        bucket.take(min(1.0, limits.burst + limits.beyond - before), limits.leak_s, now_s)
        self._buckets[source] = bucket
        if len(self._buckets) > limits.sources:
            self._buckets.popitem(last=False)
        over = bucket.missing(limits.leak_s, now_s) - limits.burst
        if over <= 0:
            return None
        hold_s = min(limits.longest_s, limits.first_s * 2.0 ** max(0.0, over - 1))
        return Penalty(hold_s, (over + 1) * limits.leak_s, before <= limits.burst)

    def try_hold(self, source: str) -> bool:
        """Take a place for an answer that is held back; False where all are taken."""
        of_one = self._held.get(source, 0)
        if of_one >= self.limits.held_of_one or self.total_held >= self.limits.held:
            return False
        self._held[source] = of_one + 1
        self.total_held += 1
        return True

    def release_hold(self, source: str) -> None:
        """Give the place back."""
        left = self._held.pop(source) - 1
        if left:
            self._held[source] = left
        self.total_held -= 1

    def check_integrity(self) -> None:
        """Bounds hold, and the places that are taken add up."""
        assert len(self._buckets) <= self.limits.sources
        assert sum(self._held.values()) == self.total_held <= self.limits.held
        assert all(0 < count <= self.limits.held_of_one for count in self._held.values())


def source_of(address: str) -> str:
    """Who counts as one: an IPv4 address, or the /64 that one IPv6 subscriber has for itself (RFC 6177)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
