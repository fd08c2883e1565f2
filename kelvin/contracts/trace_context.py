"""Names in a trace (W3C Trace Context, level 1): read from a caller, or derived from a request's id. Pure.

A request's trace and spans are found again from its id alone, so whoever knows the id can refer to them.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Final

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace, the span in it that calls, and whether the caller records it. Ids as numbers, neither is 0."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(traceparent: bytes) -> TraceContext | None:
    """None for what the specification says must be ignored: the trace is begun anew then."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


def trace_id_of(name: str) -> int:
    """128 bits that belong to a request or a replica, never 0."""
    return _digest("trace", name, 16)


def span_id_of(name: str, stage: str = "") -> int:
    """64 bits that belong to it, or to one stage of it, never 0."""
    return _digest(f"span {stage}", name, 8)


def outgoing_trace_context(caller: TraceContext | None, request_id: str) -> TraceContext | None:
    """Return the context for calls that we make for a request: the caller's trace, its own span. None without one."""
    return None if caller is None else replace(caller, span_id=span_id_of(request_id))


def _digest(kind: str, name: str, nbytes: int) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=nbytes, person=kind.encode()[:16]).digest()
    return int.from_bytes(digest, "big") or 1
