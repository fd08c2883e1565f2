"""What one address may cost before anybody has shown a key: connections at once, and how often it may ask.

The rate is a token bucket per source. A connection costs as much as a request, as its handshake costs us more. Sources
are bounded in number: the one that passed longest ago is forgotten, which only makes it cheaper for that one. Addresses
of one's own load balancers stand for many callers and are not counted.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from activator.http.failed_auth_policy import source_of
from kelvin.contracts.token_bucket import TokenBucket

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HEAD_BYTES_PER_BODY_BYTE = 16  # a chunk of one byte takes six


@dataclass(frozen=True, slots=True)
class AddressLimits:
    """Of one source: an IPv4 address or an IPv6 /64."""

    connections: int
    rate: float  # requests and connections a second
    trusted: tuple[Network, ...] = ()
    burst_s: float = 2.0  # that many seconds' worth may come at once
    sources: int = 16_384


class AddressLimiter:
    """All sources. Times are seconds of one clock that never steps back."""

    def __init__(self, limits: AddressLimits) -> None:
        self.limits = limits
        self._open: dict[str, int] = {}
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # the one that passed last comes last

    def __repr__(self) -> str:
        return f"<AddressLimiter connected={len(self._open)} known={len(self._buckets)}>"

    def source(self, address: str) -> str | None:
        """Who is counted; None for one of our own."""
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return source_of(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        if any((mapped or parsed) in network for network in self.limits.trusted):
            return None
        return source_of(address)

    def try_open(self, source: str, now_s: float) -> bool:
        """Take a place and a request's worth for a connection; False where either is used up."""
        count = self._open.get(source, 0)
        if count >= self.limits.connections or self.check_request_rate(source, now_s) is not None:
            return False
        self._open[source] = count + 1
        return True

    def closed(self, source: str) -> None:
        """Give the place back."""
        left = self._open.pop(source) - 1
        if left:
            self._open[source] = left

    def check_request_rate(self, source: str, now_s: float) -> float | None:
        """Count a request. None where it may pass; otherwise the seconds after which one may, and it is not counted."""
        rate = self.limits.rate
        bucket = self._buckets.get(source) or TokenBucket()
        if wait_s := bucket.wait_s(1, rate * self.limits.burst_s, 1 / rate, now_s):
            return wait_s
        bucket.take(1, 1 / rate, now_s)
        self._buckets[source] = bucket
        self._buckets.move_to_end(source)
        if len(self._buckets) > self.limits.sources:
            self._buckets.popitem(last=False)
        return None

    def check_integrity(self) -> None:
        """Bounds hold."""
        assert all(0 < count <= self.limits.connections for count in self._open.values())
        assert len(self._buckets) <= self.limits.sources


def is_slow(nbytes: int, window_s: float, rate: float) -> bool:
    """Whether a body of which so much came in a window is slower than `rate` bytes/s."""
    return nbytes < rate * window_s


def is_padded(raw_bytes: int, body_bytes: int, head_bytes: int) -> bool:
    """Whether what frames a body (chunk sizes, extensions, trailers) is out of all proportion to it.

    Extensions may be as long as a sender likes, and no limit of the body sees them (RFC 9112, 7.1.1: limit them).
    """
    return raw_bytes > head_bytes + HEAD_BYTES_PER_BODY_BYTE * body_bytes


def networks(text: str) -> tuple[Network, ...]:
    """Networks in CIDR, separated by commas; `none` for none. Raises ValueError."""
    if text == "none":
        return ()
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(","))
