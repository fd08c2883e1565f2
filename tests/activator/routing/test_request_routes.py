"""Routing of method, path and host to a request type."""

import pytest

from activator.routing.request_routes import (
    CancelRequest,
    ListModels,
    NoRoute,
    PassthroughRoute,
    RequestRoute,
    RunInference,
    ShowPredictor,
    ShowServer,
    ShowTimeline,
    Target,
    parse_host,
    route,
    speaks_open_inference,
)
from kelvin.contracts.errors import InvalidRequest, MethodNotAllowed, NotFound

NONE = Target()
TM = Target("t", "m")


@pytest.mark.parametrize(
    ("method", "path", "host", "want"),
    [
        pytest.param("POST", "/v1/chat/completions", "x", RunInference("/v1/chat/completions", NONE), id="chat"),
        pytest.param("POST", "/t/m/v1/completions", "x", RunInference("/v1/completions", TM), id="text by path"),
        pytest.param("POST", "/t/m@next/v1/completions", "x", RunInference("/v1/completions", Target("t", "m@next")),
                     id="an alias in the path"),
        pytest.param("POST", "/t/m%40next/v1/completions", "x", RunInference("/v1/completions", Target("t", "m@next")),
                     id="an escaped alias"),
        pytest.param("POST", "/v1/completions", "m.t.d.e", RunInference("/v1/completions", TM), id="text by host"),
        pytest.param("POST", "/v1/completions", "a.m.t.d.e", RunInference("/v1/completions", NONE),
                     id="a label too many"),
        pytest.param("POST", "/v1/completions", "t.d.e", RunInference("/v1/completions", NONE), id="a label too few"),
        pytest.param("POST", "/t/m/v1/embeddings", "x", RunInference("/v1/embeddings", TM), id="embeddings"),
        pytest.param("GET", "/v1/models", "x", ListModels(NONE), id="models"),
        pytest.param("GET", "/v1/models/m@x", "x", ListModels(NONE, "m@x"), id="one model"),
        pytest.param("GET", "/v1/requests/req_1/timeline", "x", ShowTimeline("req_1", NONE), id="a timeline"),
        pytest.param("DELETE", "/t/m/v1/requests/req_1", "x", CancelRequest("req_1", TM), id="a cancellation"),
        pytest.param("GET", "/v2", "x", ShowServer(NONE), id="the server"),
        pytest.param("GET", "/v2/", "x", ShowServer(NONE), id="the server with a trailing slash"),
        pytest.param("GET", "/t/m/v2", "x", ShowServer(TM), id="the server by path"),
        pytest.param("GET", "/v2/health/live", "x", ShowServer(NONE, "live"), id="liveness"),
        pytest.param("GET", "/t/m/v2/health/ready", "x", ShowServer(TM, "ready"), id="readiness"),
        pytest.param("GET", "/v2/models/m", "x", ShowPredictor(NONE, "m"), id="metadata of a model"),
        pytest.param("GET", "/v2/models/m/versions/0123456789ab", "x", ShowPredictor(NONE, "m@0123456789ab"),
                     id="metadata of a version"),
        pytest.param("GET", "/v2/models/m@next/ready", "x", ShowPredictor(NONE, "m@next", True), id="a model is ready"),
        pytest.param("GET", "/v2/models/m/versions/next/ready", "m.t.d.e", ShowPredictor(TM, "m@next", True),
                     id="a version is ready"),
        pytest.param("POST", "/v2/models/m/infer", "x", RunInference("/v2/infer", NONE, "m"), id="a prediction"),
        pytest.param("POST", "/t/m/v2/models/m/versions/next/infer", "x", RunInference("/v2/infer", TM, "m@next"),
                     id="a prediction by path"),
        pytest.param("PUT", "/push/v1/plans/1/chunks/2", "x", PassthroughRoute("push"), id="push"),
        pytest.param("GET", "/admin/v1/status", "x", PassthroughRoute("admin"), id="admin"),
    ],
)  # fmt: skip
def test_known_paths_are_routed(method: str, path: str, host: str, want: RequestRoute) -> None:
    assert route(method, path.encode(), host, "d.e") == want


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        pytest.param("GET", "/v1/completions", MethodNotAllowed, id="a completion is posted"),
        pytest.param("DELETE", "/v1/models", MethodNotAllowed, id="the list is only read"),
        pytest.param("GET", "/v1/requests/req_1", MethodNotAllowed, id="a request is not read"),
        pytest.param("DELETE", "/v1/requests/req_1/timeline", MethodNotAllowed, id="a timeline can't be deleted"),
        pytest.param("DELETE", "/v1/requests/a.b", NotFound, id="an invalid request id to cancel"),
        pytest.param("GET", "/", NotFound, id="nothing at the root"),
        pytest.param("GET", "/internal/v1/feed", NotFound, id="internal"),
        pytest.param("GET", "/admin/v2/x", NotFound, id="another version of the API"),
        pytest.param("GET", "/admin/v1/../internal", NotFound, id="a parent folder"),
        pytest.param("GET", "/admin/v1/%2e%2e/internal", NotFound, id="an escaped parent folder"),
        pytest.param("GET", "/admin/v1/a\\b", NotFound, id="a backslash"),
        pytest.param("GET", "/v1/requests/a/b/timeline", NotFound, id="an invalid request id"),
        pytest.param("GET", "*", NotFound, id="an asterisk"),
        pytest.param("POST", "/v2", MethodNotAllowed, id="the server is only read"),
        pytest.param("GET", "/v2/models/m/infer", MethodNotAllowed, id="a prediction is posted"),
        pytest.param("POST", "/v2/infer", NotFound, id="a prediction without a model"),
        pytest.param("GET", "/v2/models", NotFound, id="no list in the protocol"),
        pytest.param("GET", "/v2/models/m/versions/", NotFound, id="no version"),
    ],
)
def test_unknown_paths_and_methods_are_refused(method: str, path: str, kind: type) -> None:
    """Unknown paths are 404, known ones with another method 405."""
    asked = route(method, path.encode(), "x", "d.e")
    assert isinstance(asked, NoRoute)
    assert isinstance(asked.failure, kind)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        pytest.param("/chat/completions", "did you mean '/v1/chat/completions'?", id="without v1"),
        pytest.param("/t/m/embeddings", "did you mean '/v1/embeddings'?", id="without v1 below a model"),
        pytest.param("/v1/v1/models", "did you mean '/v1/models'?", id="v1 twice"),
        pytest.param("/openai/v1/completions", "did you mean '/v1/completions'?", id="another provider's prefix"),
        pytest.param("/v1/chat/completions/", "did you mean '/v1/chat/completions'?", id="a slash at the end"),
        pytest.param("/api/chat/completions", "did you mean '/v1/chat/completions'?", id="a prefix without v1"),
        pytest.param("/x/embeddings", "did you mean '/v1/embeddings'?", id="a prefix before a short route"),
        pytest.param("/v1/completions/completions", "did you mean '/v1/completions'?", id="a route twice"),
        pytest.param("/v1/chat/completions/chat/completions", "mean '/v1/chat/completions'?", id="a long one twice"),
        pytest.param("/v1/chat/completions/models", "did you mean '/v1/models'?", id="a route behind another"),
        pytest.param("/openai/deployments/m/chat/completions", "mean '/v1/chat/completions'?", id="Azure's prefix"),
        pytest.param("/v1/responses", "use /v1/chat/completions", id="the Responses API"),
        pytest.param("/v1/nothing", None, id="unknown"),
        pytest.param("/a/b/c/d/models", None, id="too deep"),
    ],
)
def test_unknown_route_names_the_likely_one(path: str, hint: str | None) -> None:
    """A wrong base URL is the usual mistake after a move from another provider."""
    asked = route("POST", path.encode(), "x", "d.e")
    assert isinstance(asked, NoRoute)
    message = asked.failure.message
    assert message.endswith("does not exist") if hint is None else hint in message


@pytest.mark.parametrize(
    ("path", "want"),
    [
        (b"/v2/models/m/infer", True),
        (b"/v2", True),
        (b"/v2/nothing", True),
        (b"/t/m/v2/models/m", True),
        (b"/v2/models/%00", True),
        (b"/v2x", False),
        (b"/v1/completions", False),
        (b"/t/m/v1/nothing", False),
    ],
)
def test_error_form_follows_the_path(path: bytes, want: bool) -> None:
    """Paths of the Open Inference Protocol use its error format, even unknown ones."""
    assert speaks_open_inference(path) == want


@pytest.mark.parametrize(
    ("values", "want"),
    [
        pytest.param([b"Localhost:8443"], "localhost", id="port and case are dropped"),
        pytest.param([b"[::1]:8443"], "[::1]", id="an IPv6 address"),
        pytest.param([], None, id="none"),
        pytest.param([b"a", b"a"], None, id="two, even the same"),
    ],
)
def test_exactly_one_host_header_is_required(values: list[bytes], want: str | None) -> None:
    found = parse_host(values)
    assert found == want if want is not None else isinstance(found, InvalidRequest)
