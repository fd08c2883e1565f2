"""How a failure looks on the wire: OpenAI's error object, an SSE event, the Open Inference Protocol's, RFC 9457 problem
details, between processes.

The status of each failure is its own, see `errors.py`. Bodies and headers are made here, and nowhere else.
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
SHOULD_RETRY: Final = "x-should-retry"  # read by OpenAI's and Anthropic's clients


ErrorForm = Callable[[Failure, str | None], bytes]  # of a failure and the request's id


class WireFailure(Fact, frozen=True):
    """A failure between processes. Decodes to a `RemoteFailure` that renders the same."""

    code: str
    status: int
    message: str
    param: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refusal, as problem details (RFC 9457)."""

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
    """The failure as it crosses processes."""
    return WireFailure(
        code=failure.code,
        status=failure.status,
        message=redact(failure.message),
        param=_param(failure),
        retryable=failure.retryable,
        retry_after_s=failure.retry_after_s,
    )


def from_wire(wire: WireFailure) -> RemoteFailure:
    """The fact that another process reported."""
    return RemoteFailure(wire.code, wire.status, wire.message, wire.param, wire.retryable, wire.retry_after_s)


def headers_of(failure: Failure) -> dict[str, str]:
    """`Retry-After` in whole seconds where a retry has a time, `Allow` with a 405 (RFC 9110, 10.2.3 and 15.5.6); the
    wait that was too long, in milliseconds; `x-should-retry: false` if a retry on this status can't help.
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
    """OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``; the id is echoed where known."""
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
    """The Open Inference Protocol's error: ``{"error": "…"}``, with our code beside it. The id is a header's."""
    return msgspec.json.encode({"error": redact(failure.message), "code": failure.code})


def sse_error(failure: Failure, request_id: str | None = None) -> bytes:
    """A terminal SSE event for a stream whose 200 is already committed; official clients raise on its `error` key."""
    return b"event: error\ndata: " + openai_error(failure, request_id) + b"\n\n"


def problem_details(failure: Failure) -> bytes:
    """RFC 9457 problem details, for the admin and push APIs."""
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
    """Return the fact that problem details report; None where the body holds none of ours."""
    try:
        problem = decoder(Problem).decode(body)
    except BadJson:
        return None
    return RemoteFailure(
        problem.code, problem.status, problem.detail, problem.param, problem.retryable, problem.retry_after_s
    )
