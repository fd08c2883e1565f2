"""Choose the traces that are sent: a share of them, by their ids."""

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
