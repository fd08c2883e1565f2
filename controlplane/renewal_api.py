"""The routes of restarts: replace all replicas of a model by new ones, and see how that goes."""

import asyncio

from fastapi import APIRouter, Request, Response

from contracts.control import Scope
from contracts.errors import Conflict, ModelNotFound, NotFound
from controlplane.answers import Renewal
from controlplane.audit import ActorOf
from controlplane.bodies import answer
from controlplane.policy.trail import Action
from controlplane.registry import Registry
from controlplane.renewal import Renewals
from controlplane.trail import Trail
from service.openapi import described
from service.principal import admin_of


def router(registry: Registry, renewals: Renewals, trail: Trail) -> APIRouter:
    """Routes under `/admin/v1`, about the caller's own models."""
    routes = APIRouter(prefix="/admin/v1")
    actor_of, turn = ActorOf(Scope.ADMIN), asyncio.Lock()

    @routes.post("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound, Conflict, status=202))
    async def restart(request: Request, model: str) -> Response:
        by = actor_of(request)
        found = registry.model(by.tenant, model)
        async with turn:  # no other order begins between the entry and this one: what is refused has none
            renewals.check(found)
            await trail.note(by, by.tenant, Action.MODEL_RESTARTED, model)
            return answer(renewals.begin(found), status=202)

    @routes.get("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound))
    async def restarted(request: Request, model: str) -> Response:
        return answer(renewals.state(registry.model(admin_of(request).tenant, model)))

    return routes
