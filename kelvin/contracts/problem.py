"""Encode failures for the wire: OpenAI errors, SSE events, Open Inference errors, RFC 9457 problem details, internal
JSON.

Each failure defines its own status, see `errors.py`. Error bodies and headers are made only here.
"""

from collections.abc import Callable
from math import ceil
from typing import Final

import msgspec

from kelvin.contracts.errors import Failure, MethodNotAllowed, RemoteFailure
from kelvin.contracts.redaction import redact
from kelvin.contracts.traffic_errors import DeadlineTooShort
from kelvin.contracts.wire import BadJson, Fact, decoder

OPENAI_CONTENT_TYPE: Final = "application/json"
PROBLEM_CONTENT_TYPE: Final = "application/problem+json"
SHOULD_RETRY: Final = "x-should-retry"  # a header that OpenAI's and Anthropic's clients read


ErrorForm = Callable[[Failure, str | None], bytes]  # encodes a failure, with the request's id


class WireFailure(Fact, frozen=True):
    """A failure between Kelvin processes. It decodes to a `RemoteFailure`, which is encoded in the same way."""

    code: str
    status: int
    message: str
    param: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failure as problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    param: str | None = None
    retry_after_s: float | None = None


def _param(failure: Failure) -> str | None:
    return None if failure.param is None else redact(failure.param)


def to_wire(failure: Failure) -> WireFailure:
    """Return the failure in the form that is sent between processes."""
    return WireFailure(
        code=failure.code,
        status=failure.status,
        message=redact(failure.message),
        param=_param(failure),
        retryable=failure.retryable,
        retry_after_s=failure.retry_after_s,
    )


def from_wire(wire: WireFailure) -> RemoteFailure:
    """Return the failure that another process reported."""
    return RemoteFailure(wire.code, wire.status, wire.message, wire.param, wire.retryable, wire.retry_after_s)


def headers_of(failure: Failure) -> dict[str, str]:
    """Return the response headers of a failure.

    - `Retry-After` in whole seconds, if the failure has a retry time (RFC 9110, 10.2.3).
    - `Allow` with a 405 (RFC 9110, 15.5.6).
    - `x-kelvin-expected-wait-ms`, if the expected wait exceeds the deadline.
    - `x-should-retry: false`, if clients usually retry this status but a retry can't help.
    """
    if isinstance(failure, MethodNotAllowed):
        return {"allow": ", ".join(failure.allowed)}
    after_s = failure.retry_after_s
    headers = {} if after_s is None else {"retry-after": str(max(1, ceil(after_s)))}
    if not failure.retryable and (failure.status in (408, 409, 429) or failure.status >= 500):
        headers[SHOULD_RETRY] = "false"
    if isinstance(failure, DeadlineTooShort):
        headers["x-kelvin-expected-wait-ms"] = str(ceil(failure.expected_s * 1000))
    return headers


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case status if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


def openai_error(failure: Failure, request_id: str | None = None) -> bytes:
    """Return OpenAI's error object ``{"error": {"message", "type", "param", "code"}}``, and our request id if known."""
    error: dict[str, object] = {
        "message": redact(failure.message),
        "type": _openai_type(failure.status),
        "param": _param(failure),
        "code": failure.code,
    }
    if request_id is not None:
        error["request_id"] = request_id
    return msgspec.json.encode({"error": error})


def open_inference_error(failure: Failure, request_id: str | None = None) -> bytes:
    """Return the Open Inference Protocol's error ``{"error": "…"}``, plus our code. A header carries the request id."""
    return msgspec.json.encode({"error": redact(failure.message), "code": failure.code})


def sse_error(failure: Failure, request_id: str | None = None) -> bytes:
    """Return a terminal SSE event for a stream whose 200 was already sent. Official clients raise on its `error`."""
    return b"event: error\ndata: " + openai_error(failure, request_id) + b"\n\n"


def problem_details(failure: Failure) -> bytes:
    """Return RFC 9457 problem details, for the admin and push APIs."""
    problem = Problem(
        type="about:blank",
        title=failure.code.replace("_", " "),
        status=failure.status,
        detail=redact(failure.message),
        code=failure.code,
        retryable=failure.retryable,
        param=_param(failure),
        retry_after_s=failure.retry_after_s,
    )
    return msgspec.json.encode(problem)


def from_problem(body: bytes) -> RemoteFailure | None:
    """Return the failure that problem details report, or None if the body is not one of ours."""
    try:
        problem = decoder(Problem).decode(body)
    except BadJson:
        return None
    return RemoteFailure(
        problem.code, problem.status, problem.detail, problem.param, problem.retryable, problem.retry_after_s
    )
