"""Track the request for which code runs. It travels with the context of tasks and threads, and in headers between
processes.

The process that answers a request calls `set_request_context`. Every log line and internal call under it then carries
the request's id.
"""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.trace_context import TraceContext, parse

REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"
_NAMES: Final = (REQUEST_ID.encode(), b"x-kelvin-request-id")
_TRACEPARENT: Final = TRACEPARENT.encode()
_VALID_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext(msgspec.Struct, frozen=True, gc=False):
    """A request's id, and its caller's trace, if any."""

    request_id: str
    trace: TraceContext | None = None


_current: ContextVar[RequestContext | None] = ContextVar("cause", default=None)


def current_request() -> RequestContext | None:
    """Return the request that this task or thread works for."""
    return _current.get()


def set_request_context(request_id: str, trace: TraceContext | None = None) -> Token[RequestContext | None]:
    """Set the request of the current context. An id other than 1 to 128 visible ASCII characters clears it."""
    return _current.set(RequestContext(request_id, trace) if _VALID_ID.fullmatch(request_id) else None)


def context_headers(explicit_headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `explicit_headers` and those that carry the current request to another process. The explicit ones win."""
    found = _current.get()
    if found is None:
        return dict(explicit_headers or {})
    request_headers = {REQUEST_ID: found.request_id}
    if found.trace is not None:
        request_headers[TRACEPARENT] = str(found.trace)
    return {**request_headers, **(explicit_headers or {})}


def with_request_context(app: ASGIApp) -> ASGIApp:
    """Wrap an application whose callers are our own processes: set the request context from their headers."""

    async def carried(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _set_from_headers(scope["headers"])
        await app(scope, receive, send)

    return carried


def _set_from_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> None:
    request_id, trace = None, None
    for name, value in raw_headers:
        if name in _NAMES:
            request_id = value.decode("latin-1")
        elif name == _TRACEPARENT:
            trace = parse(value)
    if request_id is not None:
        set_request_context(request_id, trace)
