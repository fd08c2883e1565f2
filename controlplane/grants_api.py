"""The routes of grants: an owner lets other tenants call a model. An operator names any owner with `?tenant=`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from contracts.control import Scope
from contracts.errors import CapacityExceeded, ModelNotFound, NotFound
from controlplane.answers import ModelGrant, ModelGrants
from controlplane.audit import Actor, ActorOf
from controlplane.bodies import answer
from controlplane.clock import Clock
from controlplane.facts import Model
from controlplane.policy.access import whose
from controlplane.policy.trail import Action
from controlplane.registry import Registry
from controlplane.tenants import TenantStore
from controlplane.trail import Trail
from service.openapi import described

Admin = Annotated[Actor, Depends(ActorOf(Scope.ADMIN))]
Named = Annotated[str | None, Query(alias="tenant")]


def router(registry: Registry, tenants: TenantStore, clock: Clock, trail: Trail) -> APIRouter:
    """Routes under `/admin/v1`. Who has a grant learns whose model it is and what it is called, and nothing else."""
    routes = APIRouter(prefix="/admin/v1")

    @routes.get("/grants", **described(ModelGrants, NotFound))
    async def every_grant(by: Admin, tenant: Named = None) -> Response:
        own = (await tenants.one(whose(by, tenant), clock.wall_s())).tenant
        await trail.looked(by, own, Action.ACCESS_GRANTS)
        given = tuple(_grant(model, grantee) for model in registry.models(own) for grantee in model.grantees)
        return answer(ModelGrants(given=given, had=tuple(_grant(model, own) for model in registry.granted_to(own))))

    @routes.put("/models/{model}/grants/{grantee}", **described(ModelGrant, NotFound, ModelNotFound, CapacityExceeded))
    async def grant(by: Admin, request: Request, model: str, grantee: str, tenant: Named = None) -> Response:
        owner = whose(by, tenant)
        told = await registry.grant(by, owner, model, grantee, clock.wall_s())
        return answer(ModelGrant(owner=owner, model=model, grantee=grantee, told=told))

    @routes.delete("/models/{model}/grants/{grantee}", **described(ModelGrant, NotFound, ModelNotFound))
    async def revoke(by: Admin, request: Request, model: str, grantee: str, tenant: Named = None) -> Response:
        owner = whose(by, tenant)
        told = await registry.revoke(by, owner, model, grantee, clock.wall_s())
        return answer(ModelGrant(owner=owner, model=model, grantee=grantee, told=told))

    return routes


def _grant(model: Model, grantee: str) -> ModelGrant:
    return ModelGrant(owner=model.tenant, model=model.model, grantee=grantee)
