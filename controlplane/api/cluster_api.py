"""Serve the admin API's machine routes where a cluster runs the versions.

The paths are those of `machine_api.py`. Routes that only a machine can answer are refused, with the alternative.
"""

from typing import Final

from fastapi import APIRouter, Request, Response

from kelvin.contracts.errors import OneMachineOnly, Refused
from kelvin.contracts.serving.control_messages import Scope
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_admin, require_scope
from kelvin.telemetry.policy.exposition import CONTENT_TYPE
from kelvin.telemetry.telemetry import Telemetry

_KNATIVE: Final = "Knative decides, by the model's scale"
_NODES: Final = "each node has a cache agent of its own"
_RESTART: Final = "pods are replaced by `kubectl delete pod`, one by one"
REFUSED: Final = (
    ("GET", "/models/{model}/starts", "a forecast of a start", "there is none"),
    ("GET", "/models/{model}/idle", "a break-even of warmth", _KNATIVE),
    ("POST", "/models/{model}/stop", "a stop", f"{_KNATIVE}; `min` 0 lets it go to zero"),
    ("POST", "/models/{model}/restart", "a restart", _RESTART),
    ("GET", "/models/{model}/restart", "a restart", _RESTART),
    ("GET", "/cache", "the weight cache", _NODES),
    ("POST", "/cache/evict", "the weight cache", _NODES),
    ("POST", "/cache/check", "the weight cache", _NODES),
)


def router(telemetry: Telemetry) -> APIRouter:
    """Return the routes under `/admin/v1`. `/metrics` needs the scope `operator`, the others need `admin`."""
    routes = APIRouter(prefix="/admin/v1")
    operator_of = require_scope(Scope.OPERATOR)

    @routes.get("/metrics", **route_docs(str, scope=Scope.OPERATOR))
    async def metrics(request: Request) -> Response:
        operator_of(request)
        return Response(telemetry.render_page(), media_type=CONTENT_TYPE)

    for method, path, what, instead in REFUSED:
        _refuse(routes, method, path, OneMachineOnly(what, instead))
    return routes


def _refuse(routes: APIRouter, method: str, path: str, failure: OneMachineOnly) -> None:
    async def refuse(request: Request) -> Response:
        require_admin(request)
        raise Refused(failure)

    routes.add_api_route(path, refuse, methods=[method], **route_docs(None, OneMachineOnly, status=204))
