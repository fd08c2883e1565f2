"""Match method, path and host to a route. Whether the caller may use it is decided where the route is served."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from kelvin.contracts.artifacts.kind_routes import INFER_PATH
from kelvin.contracts.errors import Failure, InvalidRequest, MethodNotAllowed, NotFound

Verb = Literal["about", "ready", "infer"]
COMPLETIONS: Final = ("/chat/completions", "/completions", "/embeddings")
# A known route behind another base URL: without /v1, with /v1 twice, with a prefix such as /api/v1, or a whole route.
_MISPLACED: Final = re.compile(rf"(?:/[^/]+){{0,3}}?(?:/v1)*({'|'.join((*COMPLETIONS, '/models'))})/?")
_TIMELINE: Final = re.compile(r"/requests/([A-Za-z0-9_-]{1,64})/timeline")
_REQUEST: Final = re.compile(r"/requests/([A-Za-z0-9_-]{1,64})")
_MODEL: Final = re.compile(r"/models/([A-Za-z0-9@-]{1,160})")
_ANY_MODEL: Final = re.compile(r"/models/((?:[A-Za-z0-9-]{1,63}/)?[A-Za-z0-9@-]{1,160})")  # also OWNER/M
# The Open Inference Protocol's paths, below /v2.
_OPEN_INFERENCE: Final = re.compile(rb"(/[^/]*/[^/]*)?/v2(/|$)")
_ABOUT: Final = ("/v2", "/v2/")
_LIVE: Final = "/health/live"
_READY: Final = "/health/ready"
_OF_MODEL: Final[tuple[tuple[re.Pattern[str], Verb], ...]] = (
    (_MODEL, "about"),
    (re.compile(r"/models/([A-Za-z0-9@-]{1,160})/ready"), "ready"),
    (re.compile(r"/models/([A-Za-z0-9@-]{1,160})/infer"), "infer"),
    (re.compile(r"/models/([A-Za-z0-9@-]{1,160})/versions/([A-Za-z0-9-]{1,64})"), "about"),
    (re.compile(r"/models/([A-Za-z0-9@-]{1,160})/versions/([A-Za-z0-9-]{1,64})/ready"), "ready"),
    (re.compile(r"/models/([A-Za-z0-9@-]{1,160})/versions/([A-Za-z0-9-]{1,64})/infer"), "infer"),
)
# Other paths are refused as unknown: a library downstream might read them in another way than we did.
_PLAIN: Final = re.compile(rb"(/[A-Za-z0-9@._~!$&'()*+,;=:-]*)+")


@dataclass(frozen=True, slots=True)
class Target:
    """The tenant and model that the URL names, if any."""

    tenant: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class RunInference:
    """A completion, chat, embeddings or prediction, for `path` of the runtime. `model_name`: a prediction's model."""

    path: str
    target: Target
    model_name: str | None = None


@dataclass(frozen=True, slots=True)
class ListModels:
    """List the tenant's models, or show one of them."""

    target: Target
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ShowTimeline:
    """Show the timeline of a request."""

    request_id: str
    target: Target


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel the request with this id, or all requests to which their caller gave this name."""

    name: str
    target: Target


@dataclass(frozen=True, slots=True)
class ShowServer:
    """Show the Open Inference Protocol's server: its metadata, or whether it is live or ready."""

    target: Target
    health: Literal["live", "ready"] | None = None


@dataclass(frozen=True, slots=True)
class ShowPredictor:
    """Show a predictor's inputs and outputs, or whether it is ready."""

    target: Target
    model_name: str
    ready: bool = False


@dataclass(frozen=True, slots=True)
class PassthroughRoute:
    """A request for an internal service, `admin` or `push`, that is passed through."""

    service: str


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No such route, with the failure to answer."""

    failure: Failure


RequestRoute = (
    RunInference | ListModels | ShowTimeline | CancelRequest | ShowServer | ShowPredictor | PassthroughRoute | NoRoute
)


def speaks_open_inference(path: bytes) -> bool:
    """Return whether errors of this path, known or not, have the Open Inference Protocol's form."""
    return _OPEN_INFERENCE.match(path) is not None


def route(method: str, path: bytes, host: str, domain: str) -> RequestRoute:
    """Return the route of a request. `path` is as sent, without the query; `host` is the result of `parse_host`."""
    path = path.replace(b"%40", b"@")  # client libraries escape these in a name and in OWNER/M
    if path.startswith(b"/v1/models/"):
        path = path.replace(b"%2F", b"/", 1)
    if _PLAIN.fullmatch(path) is None or any(part in (b".", b"..") for part in path.split(b"/")):
        return NoRoute(NotFound("route", path[:80].decode("latin-1")))
    text = path.decode("ascii")
    for service in ("admin", "push"):
        if text.startswith(f"/{service}/v1/"):
            return PassthroughRoute(service)
    target = _by_host(host, domain)
    if target is None:
        target, text = _by_path(text)
    if text in _ABOUT or text.startswith("/v2/"):
        return _route_open_inference(method, text, target)
    if not text.startswith("/v1/"):
        return _no_route(text)
    return _route_v1(method, text, target)


def parse_host(values: list[bytes]) -> str | Failure:
    """Return the only Host header in lower case, without its port. None or several are an error (RFC 9112, 3.2)."""
    if len(values) != 1:
        return InvalidRequest("host", f"({len(values)} headers)", "send exactly one Host header")
    host = values[0].decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _by_host(host: str, domain: str) -> Target | None:
    """Return the target in MODEL.TENANT.DOMAIN, or None for any other host."""
    inner = host.removesuffix("." + domain)
    labels = inner.split(".")
    return Target(labels[1], labels[0]) if inner != host and len(labels) == 2 else None


def _by_path(path: str) -> tuple[Target, str]:
    """Split /TENANT/MODEL/v1/... into target and rest. /v1/... has an empty target. The same holds for /v2."""
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[1] not in ("v1", "v2") and (parts[3] == "v2" or parts[3].startswith(("v1/", "v2/"))):
        return Target(parts[1], parts[2]), "/" + parts[3]
    return Target(), path


def _no_route(path: str) -> NoRoute:
    """Return the error for an unknown path, with a hint if clients of other providers use that path."""
    found = _MISPLACED.fullmatch(path)
    hint = ""
    if path.endswith("/responses"):
        hint = "the Responses API is not served; use /v1/chat/completions"
    elif found is not None:
        hint = f"did you mean '/v1{found[1]}'? The base URL of a client ends in /v1"
    return NoRoute(NotFound("route", path[:80], hint))


def _route_v1(method: str, path: str, target: Target) -> RequestRoute:
    inner = path.removeprefix("/v1")
    if inner in COMPLETIONS:
        return RunInference(path, target) if method == "POST" else NoRoute(MethodNotAllowed(method, ("POST",)))
    if found := _REQUEST.fullmatch(inner):
        return CancelRequest(found[1], target) if method == "DELETE" else NoRoute(MethodNotAllowed(method, ("DELETE",)))
    request_route: RequestRoute | None = None
    if inner == "/models":
        request_route = ListModels(target)
    elif found := _ANY_MODEL.fullmatch(inner):
        request_route = ListModels(target, found[1])
    elif found := _TIMELINE.fullmatch(inner):
        request_route = ShowTimeline(found[1], target)
    if request_route is None:
        return _no_route(path)
    return request_route if method == "GET" else NoRoute(MethodNotAllowed(method, ("GET",)))


def _route_open_inference(method: str, path: str, target: Target) -> RequestRoute:
    inner = path.removeprefix("/v2")
    request_route: RequestRoute | None = None
    if path in _ABOUT:
        request_route = ShowServer(target)
    elif inner in (_LIVE, _READY):
        request_route = ShowServer(target, "live" if inner == _LIVE else "ready")
    else:
        for pattern, verb in _OF_MODEL:
            if (found := pattern.fullmatch(inner)) is not None:
                request_route = _route_predictor(target, "@".join(found.groups()), verb)
    if request_route is None:
        return NoRoute(NotFound("route", path[:80]))
    wanted = "POST" if isinstance(request_route, RunInference) else "GET"
    return request_route if method == wanted else NoRoute(MethodNotAllowed(method, (wanted,)))


def _route_predictor(target: Target, model_name: str, verb: Verb) -> RequestRoute:
    """Return a predictor's route. `model_name` is M, M@ALIAS or M@VERSION; a name with both is rejected later."""
    return (
        RunInference(INFER_PATH, target, model_name)
        if verb == "infer"
        else ShowPredictor(target, model_name, verb == "ready")
    )
