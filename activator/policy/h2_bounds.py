"""What one HTTP/2 connection may cost by its frames alone, which no limit of requests sees.

A rate is a generic cell rate algorithm (ITU-T I.371): one number, the time at which its bucket is full again. Beyond it
the connection ends with ENHANCE_YOUR_CALM (RFC 9113, 10.5): rapid resets (CVE-2023-44487), also those that a peer makes
us do (CVE-2025-8671), floods of CONTINUATION (CVE-2024-27316), of SETTINGS (CVE-2019-9515), PING (CVE-2019-9512),
PRIORITY (CVE-2019-9513) and of frames that carry nothing (CVE-2019-9518).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
ACK: Final = 0x1
SMALL_BYTES: Final = 512  # of DATA: with less in it a frame costs more than its bytes


class Kind(IntEnum):
    """RFC 9113, 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second, of which `burst` may come at once."""

    per_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Of one connection. `block_bytes` are of a header list as it is encoded, with all of its CONTINUATION."""

    streams: int
    stall_s: float  # for which a peer may take nothing of what waits for it
    block_bytes: int
    continuations: int = 8
    resets: Rate = Rate(20, 200)
    settings: Rate = Rate(1, 16)
    pings: Rate = Rate(10, 64)
    small: Rate = Rate(500, 2000)  # frames that carry little or nothing


class Bucket:
    """What is left of one rate. Times are seconds of one clock that never steps back."""

    __slots__ = ("_full_at_s", "_rate")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._full_at_s = 0.0

    def try_take(self, now_s: float) -> bool:
        """Count one; False beyond the rate."""
        full_at_s = max(self._full_at_s, now_s) + 1 / self._rate.per_s
        if full_at_s - now_s > self._rate.burst / self._rate.per_s + 1e-9:
            return False
        self._full_at_s = full_at_s
        return True


class FrameBounds:
    """One connection's, told of every frame before it is parsed."""

    def __init__(self, limits: Http2Limits) -> None:
        self._limits = limits
        self._resets = Bucket(limits.resets)
        self._settings = Bucket(limits.settings)
        self._pings = Bucket(limits.pings)
        self._small = Bucket(limits.small)
        self._block_bytes = 0
        self._continuations = 0
        self._excused = 0  # WINDOW_UPDATE that answer what we sent
        self._begun = 0  # the last stream that was
        self._bodies = 0  # that were begun and have not ended, of whichever stream
        self.in_block = False  # a header list has begun and is not whole

    def sent_data(self) -> None:
        """A frame of ours went out: its stream and the connection may be given room for it."""
        self._excused = min(self._excused + 2, 2 * self._limits.small.burst)

    def try_reset(self, now_s: float) -> bool:
        """A stream ended for nothing, by its peer, by us for what came on it, or since it should not have begun; False
        beyond the rate.
        """
        return self._resets.try_take(now_s)

    def too_much(self, kind: int, flags: int, stream: int, length: int, now_s: float) -> str | None:
        """What there is too much of, with this frame; None where it may pass."""
        if kind == Kind.DATA:
            if not self._is_due(flags) and length < SMALL_BYTES and not self._small.try_take(now_s):
                return "frames that carry little"
        elif kind == Kind.HEADERS:
            if not self._begins(flags, stream) and not self._is_due(flags) and not self._small.try_take(now_s):
                return "frames that carry little"
            return self._list(kind, flags, length)
        elif kind == Kind.CONTINUATION:
            return self._list(kind, flags, length)
        elif kind == Kind.RST_STREAM:
            return None if self.try_reset(now_s) else "resets"
        elif kind == Kind.SETTINGS:
            bucket = self._small if flags & ACK else self._settings
            return None if bucket.try_take(now_s) else "SETTINGS"
        elif kind == Kind.PING:
            return None if self._pings.try_take(now_s) else "PING"
        elif kind == Kind.WINDOW_UPDATE and self._excused:
            self._excused -= 1
        elif not self._small.try_take(now_s):
            return "frames that carry little"
        return None

    def _begins(self, flags: int, stream: int) -> bool:
        """A request, whose rate is bounded elsewhere. If not: trailers, or what comes for a stream that has ended."""
        if stream <= self._begun:
            return False
        self._begun = stream
        if not flags & END_STREAM:
            # Ends that never come are not saved up: no more are due than streams that `h2` lets be open.
            self._bodies = min(self._bodies + 1, 2 * self._limits.streams)
        return True

    def _is_due(self, flags: int) -> bool:
        """The end of a body: one for each that was begun, however little it carries."""
        if not flags & END_STREAM or not self._bodies:
            return False
        self._bodies -= 1
        return True

    def _list(self, kind: int, flags: int, length: int) -> str | None:
        if kind == Kind.HEADERS:
            self._block_bytes, self._continuations = length, 0
        else:
            self._block_bytes += length
            self._continuations += 1
        self.in_block = not flags & END_HEADERS
        if self._continuations > self._limits.continuations:
            return "CONTINUATION"
        return "a header list" if self._block_bytes > self._limits.block_bytes else None
