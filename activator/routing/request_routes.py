"""What a method, a path and a host ask for. Whether the caller may have it is decided where it is served."""

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
_ANY_MODEL: Final = re.compile(r"/models/((?:[A-Za-z0-9-]{1,63}/)?[A-Za-z0-9@-]{1,160})")  # OWNER/M, too
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
# A path that a client library downstream might read in another way than we did is refused as unknown.
_PLAIN: Final = re.compile(rb"(/[A-Za-z0-9@._~!$&'()*+,;=:-]*)+")


@dataclass(frozen=True, slots=True)
class Target:
    """Which tenant and model the URL names, where it names them."""

    tenant: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class RunInference:
    """A completion, chat, embeddings or prediction, as `path` of the runtime. A prediction's model is `named` by the
    rest of the path."""

    path: str
    target: Target
    named: str | None = None


@dataclass(frozen=True, slots=True)
class ListModels:
    """The tenant's models, or one of them."""

    target: Target
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ShowTimeline:
    """How a request went."""

    request_id: str
    target: Target


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A request is to end: one of that id, or those that their caller gave that name."""

    name: str
    target: Target


@dataclass(frozen=True, slots=True)
class ShowServer:
    """The Open Inference Protocol's server: who it is, or whether it lives and is ready."""

    target: Target
    health: Literal["live", "ready"] | None = None


@dataclass(frozen=True, slots=True)
class ShowPredictor:
    """What a model that predicts takes and gives, or whether it is ready."""

    target: Target
    named: str
    ready: bool = False


@dataclass(frozen=True, slots=True)
class PassthroughRoute:
    """Something of a process behind us, passed through: `admin` or `push`."""

    service: str


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Nothing that there is."""

    failure: Failure


RequestRoute = (
    RunInference | ListModels | ShowTimeline | CancelRequest | ShowServer | ShowPredictor | PassthroughRoute | NoRoute
)


def speaks_open_inference(path: bytes) -> bool:
    """Whether errors of a path, also of one that there is not, are in that protocol's form."""
    return _OPEN_INFERENCE.match(path) is not None


def route(method: str, path: bytes, host: str, domain: str) -> RequestRoute:
    """`path` is as sent, without the query; `host` is `host_of`'s."""
    path = path.replace(b"%40", b"@")  # what client libraries escape of a name, and of OWNER/M
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


def host_of(values: list[bytes]) -> str | Failure:
    """The one Host (RFC 9112, 3.2: none or several are an error), lower case, without its port."""
    if len(values) != 1:
        return InvalidRequest("host", f"({len(values)} headers)", "send exactly one Host header")
    host = values[0].decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _by_host(host: str, domain: str) -> Target | None:
    """MODEL.TENANT.DOMAIN, or None where the host says nothing."""
    inner = host.removesuffix("." + domain)
    labels = inner.split(".")
    return Target(labels[1], labels[0]) if inner != host and len(labels) == 2 else None


def _by_path(path: str) -> tuple[Target, str]:
    """/TENANT/MODEL/v1/…, or /v1/… without a target; likewise /v2."""
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[1] not in ("v1", "v2") and (parts[3] == "v2" or parts[3].startswith(("v1/", "v2/"))):
        return Target(parts[1], parts[2]), "/" + parts[3]
    return Target(), path


def _no_route(path: str) -> NoRoute:
    """Return the error of an unknown path. A path that a client of another provider asks for has a hint."""
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


def _route_predictor(target: Target, named: str, verb: Verb) -> RequestRoute:
    """`named` is M, M@ALIAS or M@VERSION; a name with an alias and a version as well is no reference."""
    return RunInference(INFER_PATH, target, named) if verb == "infer" else ShowPredictor(target, named, verb == "ready")
