"""Trace and span ids (W3C Trace Context, level 1), parsed from a caller or derived from a request's id. Pure.

All ids of a request can be computed from its id alone. So every process that knows the id can refer to them.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Final

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace, the calling span, and whether the caller records it. Ids are numbers other than 0."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(traceparent: bytes) -> TraceContext | None:
    """Return the context, or None if the specification says to ignore the header. A new trace begins then."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


def trace_id_of(name: str) -> int:
    """Return the 128-bit trace id of a request or a replica, never 0."""
    return _digest("trace", name, 16)


def span_id_of(name: str, stage: str = "") -> int:
    """Return the 64-bit span id of a request or replica, or of one of its stages, never 0."""
    return _digest(f"span {stage}", name, 8)


def outgoing_trace_context(caller: TraceContext | None, request_id: str) -> TraceContext | None:
    """Return the context for calls on behalf of a request: the caller's trace, the request's span. None without one."""
    return None if caller is None else replace(caller, span_id=span_id_of(request_id))


def _digest(kind: str, name: str, nbytes: int) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=nbytes, person=kind.encode()[:16]).digest()
    return int.from_bytes(digest, "big") or 1
