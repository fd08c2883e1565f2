"""The routes of restarts: replace all replicas of a model by new ones, and see how that goes."""

from fastapi import APIRouter, Request, Response

from contracts.errors import Conflict, ModelNotFound, NotFound
from controlplane.answers import Renewal
from controlplane.bodies import answer
from controlplane.registry import Registry
from controlplane.renewal import Renewals
from service.openapi import described
from service.principal import admin_of


def router(registry: Registry, renewals: Renewals) -> APIRouter:
    """Routes under `/admin/v1`, about the caller's own models."""
    routes = APIRouter(prefix="/admin/v1")

    @routes.post("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound, Conflict, status=202))
    async def restart(request: Request, model: str) -> Response:
        found = registry.model(admin_of(request).tenant, model)
        return answer(renewals.begin(found), status=202)

    @routes.get("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound))
    async def restarted(request: Request, model: str) -> Response:
        return answer(renewals.state(registry.model(admin_of(request).tenant, model)))

    return routes
