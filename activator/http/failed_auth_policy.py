"""Slow down a source that shows bad keys. Requests with a good key are never delayed: see design note 9.

Each source has a token bucket. Up to `burst` failures in a row cost nothing, since users paste wrong keys. Each further
failure is answered late, and each delay is twice the one before, up to `longest_s`. The number of sources is bounded.
The source with the oldest failure is forgotten first, which only gives it a fresh bucket.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from kelvin.contracts.token_bucket import TokenBucket


@dataclass(frozen=True, slots=True)
class FailedAuthLimits:
    """Limits for failed authentication. Counts are failures, times are seconds."""

    burst: int = 20
    leak_s: float = 3.0  # until one failure is forgotten
    first_s: float = 0.1
    longest_s: float = 5.0
    max_excess: int = 20  # bound on counted failures above the burst, so that a source recovers after a flood
    max_sources: int = 4096
    max_held: int = 1024  # responses delayed at once, all sources
    max_held_per_source: int = 256


@dataclass(frozen=True, slots=True)
class Penalty:
    """Delay the response by `hold_s`, and report that another failure is free after `retry_after_s`."""

    hold_s: float
    retry_after_s: float
    is_first: bool  # this failure is the first above the burst


class FailedAuthLimiter:
    """Failure buckets of all sources. Times are seconds of one monotonic clock."""

    def __init__(self, limits: FailedAuthLimits | None = None) -> None:
        self.limits = limits or FailedAuthLimits()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # oldest failure first
        self._held: dict[str, int] = {}
        self.total_held = 0

    def __repr__(self) -> str:
        return f"<FailedAuthLimiter sources={len(self._buckets)} held={self.total_held}>"

    def record_failure(self, source: str, now_s: float) -> Penalty | None:
        """Count a failure. Return None within the burst."""
        limits = self.limits
        bucket = self._buckets.pop(source, None) or TokenBucket()
        previous_failures = bucket.missing(limits.leak_s, now_s)
        bucket.take(min(1.0, limits.burst + limits.max_excess - previous_failures), limits.leak_s, now_s)
        self._buckets[source] = bucket
        if len(self._buckets) > limits.max_sources:
            self._buckets.popitem(last=False)
        excess = bucket.missing(limits.leak_s, now_s) - limits.burst
        if excess <= 0:
            return None
        hold_s = min(limits.longest_s, limits.first_s * 2.0 ** max(0.0, excess - 1))
        return Penalty(hold_s, (excess + 1) * limits.leak_s, previous_failures <= limits.burst)

    def try_hold(self, source: str) -> bool:
        """Take a place for a delayed response. Return False if the source or all sources together have too many."""
        held_for_source = self._held.get(source, 0)
        if held_for_source >= self.limits.max_held_per_source or self.total_held >= self.limits.max_held:
            return False
        self._held[source] = held_for_source + 1
        self.total_held += 1
        return True

    def release_hold(self, source: str) -> None:
        """Release the place of a delayed response."""
        left = self._held.pop(source) - 1
        if left:
            self._held[source] = left
        self.total_held -= 1

    def check_integrity(self) -> None:
        """Assert the bounds, and that the counts of delayed responses add up."""
        assert len(self._buckets) <= self.limits.max_sources
        assert sum(self._held.values()) == self.total_held <= self.limits.max_held
        assert all(0 < count <= self.limits.max_held_per_source for count in self._held.values())


def source_of(address: str) -> str:
    """Return the source that an address counts for: an IPv4 address, or the /64 of an IPv6 subscriber (RFC 6177)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
