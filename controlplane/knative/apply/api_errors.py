"""Classify the error responses of an API server. Pure.

See https://kubernetes.io/docs/reference/using-api/api-concepts/; other facts were observed with Kubernetes 1.36.
"""

import json
from typing import Any, Final

from controlplane.knative.apply.cluster import (
    ApiFailure,
    Busy,
    Denied,
    Expired,
    FieldConflict,
    Invalid,
    Missing,
    Unreachable,
    WriteConflict,
)
from kelvin.contracts.wire import BadJson, decode_any

MAX_MESSAGE_CHARS: Final = 400  # a longer message is cut
MAX_RETRY_AFTER_S: Final = 300.0  # longer waits that a server asks for are cut to this

_FAILURE_BY_STATUS: Final[dict[int, type[ApiFailure]]] = {
    401: Denied,
    403: Denied,
    404: Missing,
    409: WriteConflict,
    410: Expired,
}
# Message of an apply with a field that the schema lacks. Its status is 500, without a reason.
_TYPED: Final = "failed to create typed patch object"


def failure_from_response(status: int, body: bytes, retry_after: str | None = None) -> ApiFailure:
    """Return the failure of an error status. `retry_after` is the header's value in seconds; a date is ignored."""
    answer = _status(body)
    message = one_line(answer.get("message") or body.decode(errors="replace") or f"status {status}")
    details = answer.get("details") or {}
    wait_s = _seconds(retry_after) or _seconds(details.get("retryAfterSeconds"))
    if status == 429 or (wait_s is not None and status >= 500):
        return Busy(message, wait_s or 1.0)
    if status == 409 and any(each.get("reason") == "FieldManagerConflict" for each in details.get("causes") or ()):
        return FieldConflict(message)
    if status in _FAILURE_BY_STATUS:
        return _FAILURE_BY_STATUS[status](message)
    if 400 <= status < 500 or _TYPED in message:
        return Invalid(message)
    return Unreachable(message)


def failure_from_event(event: Any) -> ApiFailure:
    """Return the failure of a watch's ERROR event, whose object is a Status."""
    answer = event if isinstance(event, dict) else {}
    code = answer.get("code")
    return failure_from_response(code if isinstance(code, int) else 500, json.dumps(answer).encode())


def one_line(text: str) -> str:
    """Return a foreign message on one line, cut to MAX_MESSAGE_CHARS."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"


def _status(body: bytes) -> dict[str, Any]:
    try:
        answer = decode_any(body)
    except BadJson:
        return {}
    return answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}


def _seconds(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds > 0 else None
