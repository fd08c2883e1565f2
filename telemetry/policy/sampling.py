"""Choose the traces that are sent: a share of them by their ids, and at most a fixed rate of them."""

from contracts.trace import TraceContext

_LOW: int = (1 << 64) - 1


def is_sampled(trace_id: int, share: float) -> bool:
    """The same for everybody who looks at the trace (OpenTelemetry's TraceIdRatioBased: the lower 64 bits)."""
    return (trace_id & _LOW) < round(share * (1 << 64))


def is_wanted(trace_id: int, caller: TraceContext | None, share: float) -> bool:
    """Within the share, unless its caller said that the trace is not recorded. That a caller records it makes no
    difference: strangers don't decide what is written here.
    """
    return (caller is None or caller.sampled) and is_sampled(trace_id, share)


class Allowance:
    """A token bucket: `per_s` traces a second, and `burst` at once after a quiet time. Times are seconds."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = now

    def __repr__(self) -> str:
        return f"<Allowance {self._left:.0f}/{self._burst:.0f}>"

    def take(self, now: float) -> bool:
        """Take one token. Return False if there is none."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
