"""Responses of an API server become our failures: permanent, temporary, or busy with a time to wait."""

import json
from typing import Any

import pytest

from controlplane.knative.apply.api_errors import (
    MAX_MESSAGE_CHARS,
    MAX_RETRY_AFTER_S,
    failure_from_event,
    failure_from_response,
)
from controlplane.knative.apply.cluster import (
    ApiFailure,
    Busy,
    Denied,
    Expired,
    FieldConflict,
    Invalid,
    Missing,
    Ref,
    Unreachable,
    WriteConflict,
    collection_path,
)


def status(message: str, **more: Any) -> bytes:
    return json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, **more}).encode()


@pytest.mark.parametrize(
    ("code", "body", "after", "want"),
    [
        pytest.param(401, status("Unauthorized"), None, Denied("Unauthorized"), id="unknown credentials"),
        pytest.param(403, status("no"), None, Denied("no"), id="not allowed"),
        pytest.param(404, status("no such"), None, Missing("no such"), id="no such object"),
        pytest.param(404, b"404 page not found\n", None, Missing("404 page not found"), id="no such kind"),
        pytest.param(409, status("stale"), None, WriteConflict("stale"), id="a stale version"),
        pytest.param(
            409,
            status("1 conflict", details={"causes": [{"reason": "FieldManagerConflict", "field": ".spec.x"}]}),
            None,
            FieldConflict("1 conflict"),
            id="a field of another manager",
        ),
        pytest.param(410, status("old"), None, Expired("old"), id="an expired version"),
        pytest.param(400, status("bad"), None, Invalid("bad"), id="a bad request"),
        pytest.param(413, status("big"), None, Invalid("big"), id="too large"),
        pytest.param(422, status("bad"), None, Invalid("bad"), id="refused by the schema"),
        pytest.param(
            500,
            status("failed to create typed patch object (m/x; v1): .spec.bogus: field not declared in schema"),
            None,
            Invalid("failed to create typed patch object (m/x; v1): .spec.bogus: field not declared in schema"),
            id="an apply with an unknown field",
        ),
        pytest.param(
            500, status("failed calling webhook"), None, Unreachable("failed calling webhook"), id="a webhook"
        ),
        pytest.param(503, b"", None, Unreachable("status 503"), id="an empty body"),
        pytest.param(502, b"<html>\nno</html>", None, Unreachable("<html> no</html>"), id="a page of a proxy"),
        pytest.param(429, status("later"), "7", Busy("later", 7.0), id="busy for some seconds"),
        pytest.param(429, status("later"), None, Busy("later", 1.0), id="busy without a time"),
        pytest.param(429, b"", "Wed, 21 Oct 2015 07:28:00 GMT", Busy("status 429", 1.0), id="a date is none"),
        pytest.param(503, status("later"), "2", Busy("later", 2.0), id="unavailable for some seconds"),
        pytest.param(429, b"", "1e9", Busy("status 429", MAX_RETRY_AFTER_S), id="the wait is capped"),
        pytest.param(
            504, status("slow", details={"retryAfterSeconds": 3}), None, Busy("slow", 3.0), id="says so in its details"
        ),
    ],
)
def test_response_status_is_classified(code: int, body: bytes, after: str | None, want: ApiFailure) -> None:
    assert failure_from_response(code, body, after) == want


@pytest.mark.parametrize(
    ("event", "want"),
    [
        pytest.param({"kind": "Status", "code": 410, "message": "too old"}, Expired("too old"), id="too old"),
        pytest.param({"kind": "Status", "code": 500, "message": "odd"}, Unreachable("odd"), id="a broken watch"),
        pytest.param(None, Unreachable("{}"), id="an empty event"),
    ],
)
def test_watch_error_event_is_classified(event: Any, want: ApiFailure) -> None:
    """The event has type ERROR."""
    assert failure_from_event(event) == want


def test_messages_are_one_short_line() -> None:
    """They are shown in statuses."""
    message = failure_from_response(422, status("a\nb " * 1000)).message
    assert len(message) == MAX_MESSAGE_CHARS
    assert "\n" not in message


@pytest.mark.parametrize(
    ("ref", "want"),
    [
        (Ref("v1", "Namespace", None, "a"), "/api/v1/namespaces/a"),
        (Ref("serving.knative.dev/v1", "Service", "n", "a"), "/apis/serving.knative.dev/v1/namespaces/n/services/a"),
        (Ref("v1", "Secret", "n/../x", "a?b"), "/api/v1/namespaces/n%2F..%2Fx/secrets/a%3Fb"),
    ],
)
def test_collection_paths_match_discovery(ref: Ref, want: str) -> None:
    assert ref.path == want


def test_collection_paths_without_namespace() -> None:
    """The path covers all namespaces."""
    assert collection_path("discovery.k8s.io/v1", "EndpointSlice", None) == "/apis/discovery.k8s.io/v1/endpointslices"
