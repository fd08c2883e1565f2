"""Limit what one address may use before it has shown a key: open connections, and requests per second.

The rate is a token bucket per source. A new connection takes one token, like a request, although its handshake is more
work for us. The number of sources is bounded. The least recently admitted source is forgotten first, which only gives
it a fresh bucket. The operator's own load balancers (`trusted`) stand for many callers, so they are not counted.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from activator.http.failed_auth_policy import source_of
from kelvin.contracts.token_bucket import TokenBucket

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HEAD_BYTES_PER_BODY_BYTE = 16  # a chunk of one byte has six bytes of framing


@dataclass(frozen=True, slots=True)
class AddressLimits:
    """Limits of one source: an IPv4 address or an IPv6 /64."""

    max_connections: int
    rate: float  # requests and connections a second
    trusted: tuple[Network, ...] = ()
    burst_s: float = 2.0  # seconds of `rate` that may arrive at once
    max_sources: int = 16_384


class AddressLimiter:
    """Connection counts and token buckets of all sources. Times are seconds of one monotonic clock."""

    def __init__(self, limits: AddressLimits) -> None:
        self.limits = limits
        self._open: dict[str, int] = {}
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # least recently admitted first

    def __repr__(self) -> str:
        return f"<AddressLimiter connected={len(self._open)} known={len(self._buckets)}>"

    def source(self, address: str) -> str | None:
        """Return the source that this address counts for, or None for a trusted network."""
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return source_of(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        if any((mapped or parsed) in network for network in self.limits.trusted):
            return None
        return source_of(address)

    def try_open(self, source: str, now_s: float) -> bool:
        """Count a new connection and charge it as one request. Return False if either limit is reached."""
        count = self._open.get(source, 0)
        if count >= self.limits.max_connections or self.check_request_rate(source, now_s) is not None:
            return False
        self._open[source] = count + 1
        return True

    def record_closed(self, source: str) -> None:
        """Record that a counted connection has closed."""
        remaining = self._open.pop(source) - 1
        if remaining:
            self._open[source] = remaining

    def check_request_rate(self, source: str, now_s: float) -> float | None:
        """Count a request and return None, or return the seconds to wait. A request that must wait is not counted."""
        rate = self.limits.rate
        bucket = self._buckets.get(source) or TokenBucket()
        if wait_s := bucket.wait_s(1, rate * self.limits.burst_s, 1 / rate, now_s):
            return wait_s
        bucket.take(1, 1 / rate, now_s)
        self._buckets[source] = bucket
        self._buckets.move_to_end(source)
        if len(self._buckets) > self.limits.max_sources:
            self._buckets.popitem(last=False)
        return None

    def check_integrity(self) -> None:
        """Assert that connection counts and the number of sources are within their limits."""
        assert all(0 < count <= self.limits.max_connections for count in self._open.values())
        assert len(self._buckets) <= self.limits.max_sources


def is_slow(nbytes: int, window_s: float, rate: float) -> bool:
    """Return whether a body that sent `nbytes` in `window_s` is slower than `rate` bytes/s."""
    return nbytes < rate * window_s


def is_padded(raw_bytes: int, body_bytes: int, head_bytes: int) -> bool:
    """Return whether the framing of a body (chunk sizes, extensions, trailers) is out of proportion to the body. Chunk
    extensions may have any length, and the body limit does not count them (RFC 9112, 7.1.1: limit them).
    """
    return raw_bytes > head_bytes + HEAD_BYTES_PER_BODY_BYTE * body_bytes


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse comma-separated CIDR networks; `none` means an empty tuple. Raises ValueError."""
    if text == "none":
        return ()
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(","))
