"""Serve the routes of tenants, keys and grants. An admin sees the own tenant; an operator names any with `?tenant=`."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import structs
from starlette.routing import Route

from controlplane.api.types.access_types import (
    Keys,
    KeyStatus,
    MadeKey,
    NewKey,
    NewTenant,
    RevokedKey,
    Rotate,
    SetLimits,
    StatedLimits,
    Tenants,
    TenantStatus,
)
from controlplane.api.types.admin_types import ModelGrant, ModelGrants
from controlplane.audit.audit_entry_policy import AuditAction
from controlplane.audit.audit_log import AuditLog
from controlplane.audit.audit_rows import Actor, RequireActor
from controlplane.clock import Clock
from controlplane.db.nul_characters import read_json
from controlplane.registry.key_rows import Key
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.access import KeySpec, target_tenant
from controlplane.registry.policy.domain import Model
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import Tenant, TenantStore
from controlplane.scaling.admin_operations import AdminOperations
from kelvin.contracts.errors import CapacityExceeded, Conflict, ModelNotFound, NotFound
from kelvin.contracts.serving.control_messages import KeyUses, Scope, scope_allows
from kelvin.ipc.http_bodies import LARGE_BYTES, empty_response, json_response
from kelvin.ipc.openapi import route_docs

Admin = Annotated[Actor, Depends(RequireActor(Scope.ADMIN))]
Operator = Annotated[Actor, Depends(RequireActor(Scope.OPERATOR))]
TenantQuery = Annotated[str | None, Query(alias="tenant")]


@dataclass(frozen=True, slots=True)
class AccessStores:
    """The stores of tenants and keys."""

    tenants: TenantStore
    keys: KeyStore


def internal_routes(access: AccessStores) -> list[Route]:
    """Return the internal routes: activators report the use of keys, the snapshotter reads a tenant's limits."""

    async def uses(request: Request) -> Response:
        await access.keys.record_uses((await read_json(request, KeyUses, LARGE_BYTES)).used_at_s)
        return empty_response()

    async def limits(request: Request) -> Response:
        return json_response(await access.tenants.limits(request.path_params["tenant"]))

    return [
        Route("/internal/v1/keys/uses", uses, methods=["POST"]),
        Route("/internal/v1/tenants/{tenant}/limits", limits, methods=["GET"]),
    ]


def router(access: AccessStores, changes: AdminOperations, clock: Clock, audit_log: AuditLog) -> APIRouter:
    """Return the routes under `/admin/v1`. An answer with a key's secret has `cache-control: no-store`."""
    routes = APIRouter(prefix="/admin/v1")
    tenants, keys = access.tenants, access.keys

    @routes.get("/tenants", **route_docs(Tenants))
    async def every_tenant(actor: Admin) -> Response:
        now_s = clock.wall_s()
        sees_all = scope_allows(actor.scopes, Scope.OPERATOR)
        found = await tenants.all_tenants(now_s) if sees_all else [await tenants.tenant_status(actor.tenant, now_s)]
        return json_response(Tenants(tenants=tuple(map(_tenant, found))))

    @routes.post(
        "/tenants",
        **route_docs(
            TenantStatus, Conflict, CapacityExceeded, status=201, request_body=NewTenant, scope=Scope.OPERATOR
        ),
    )
    async def create_tenant(actor: Operator, request: Request) -> Response:
        body = await read_json(request, NewTenant)
        return json_response(_tenant(await tenants.create(actor, body.tenant, clock.wall_s())), status=201)

    @routes.post("/tenants/{tenant}/suspend", **route_docs(TenantStatus, NotFound, Conflict, scope=Scope.OPERATOR))
    async def suspend(actor: Operator, tenant: str) -> Response:
        return json_response(_tenant(await changes.suspend(actor, tenant)))

    @routes.post("/tenants/{tenant}/resume", **route_docs(TenantStatus, NotFound, scope=Scope.OPERATOR))
    async def resume(actor: Operator, tenant: str) -> Response:
        return json_response(_tenant(await changes.resume(actor, tenant)))

    @routes.put(
        "/tenants/{tenant}/limits",
        **route_docs(TenantStatus, NotFound, Conflict, request_body=SetLimits, scope=Scope.OPERATOR),
    )
    async def limit(actor: Operator, tenant: str, request: Request) -> Response:
        body = await read_json(request, SetLimits)
        return json_response(_tenant(await tenants.set_limits(actor, tenant, body.stated_values(), clock.wall_s())))

    @routes.delete("/tenants/{tenant}", **route_docs(None, NotFound, Conflict, status=204, scope=Scope.OPERATOR))
    async def delete(actor: Operator, tenant: str, force: bool = False) -> Response:
        await changes.delete_tenant(actor, tenant, force)
        return empty_response()

    @routes.get("/keys", **route_docs(Keys, NotFound))
    async def every_key(actor: Admin, tenant: TenantQuery = None) -> Response:
        now_s = clock.wall_s()
        owner = target_tenant(actor, tenant)
        found = await keys.tenant_keys(owner, now_s)
        await audit_log.record_access(actor, owner, AuditAction.ACCESS_KEYS)
        return json_response(Keys(keys=tuple(_key(key, now_s) for key in found)))

    @routes.post("/keys", **route_docs(MadeKey, NotFound, CapacityExceeded, status=201, request_body=NewKey))
    async def create_key(actor: Admin, request: Request, tenant: TenantQuery = None) -> Response:
        owner, body, now_s = target_tenant(actor, tenant), await read_json(request, NewKey), clock.wall_s()
        grant = KeySpec(body.name, body.scopes, body.models)
        key, text = await keys.create(actor, owner, grant, body.expires_in_s, now_s)
        return _secret(MadeKey(key=_key(key, now_s), secret=text))

    @routes.post(
        "/keys/{key_id}/rotate",
        **route_docs(MadeKey, NotFound, Conflict, CapacityExceeded, status=201, request_body=Rotate),
    )
    async def rotate(actor: Admin, key_id: str, request: Request, tenant: TenantQuery = None) -> Response:
        owner, body, now_s = target_tenant(actor, tenant), await read_json(request, Rotate), clock.wall_s()
        key, text, old = await keys.rotate(actor, owner, key_id, body.overlap_s, now_s)
        return _secret(MadeKey(key=_key(key, now_s), secret=text, old=_key(old, now_s)))

    @routes.post("/keys/{key_id}/revoke", **route_docs(RevokedKey, NotFound, Conflict))
    async def revoke(actor: Admin, key_id: str, tenant: TenantQuery = None) -> Response:
        now_s = clock.wall_s()
        key, told = await keys.revoke(actor, target_tenant(actor, tenant), key_id, now_s)
        return json_response(RevokedKey(key=_key(key, now_s), told=told))

    return routes


def grants_router(registry: Registry, tenants: TenantStore, clock: Clock, audit_log: AuditLog) -> APIRouter:
    """Return the routes of grants: an owner lets other tenants call a model. An operator names any owner with
    `?tenant=`.

    A grantee learns the owner and the name of the model, and nothing else.
    """
    routes = APIRouter(prefix="/admin/v1")

    @routes.get("/grants", **route_docs(ModelGrants, NotFound))
    async def every_grant(actor: Admin, tenant: TenantQuery = None) -> Response:
        tenant_name = (await tenants.tenant_status(target_tenant(actor, tenant), clock.wall_s())).tenant
        await audit_log.record_access(actor, tenant_name, AuditAction.ACCESS_GRANTS)
        given = tuple(_grant(model, grantee) for model in registry.models(tenant_name) for grantee in model.grantees)
        return json_response(
            ModelGrants(
                given=given, had=tuple(_grant(model, tenant_name) for model in registry.models_granted_to(tenant_name))
            )
        )

    @routes.put("/models/{model}/grants/{grantee}", **route_docs(ModelGrant, NotFound, ModelNotFound, CapacityExceeded))
    async def grant(actor: Admin, request: Request, model: str, grantee: str, tenant: TenantQuery = None) -> Response:
        owner = target_tenant(actor, tenant)
        told = await registry.grant(actor, owner, model, grantee, clock.wall_s())
        return json_response(ModelGrant(owner=owner, model=model, grantee=grantee, told=told))

    @routes.delete("/models/{model}/grants/{grantee}", **route_docs(ModelGrant, NotFound, ModelNotFound))
    async def revoke(actor: Admin, request: Request, model: str, grantee: str, tenant: TenantQuery = None) -> Response:
        owner = target_tenant(actor, tenant)
        told = await registry.revoke(actor, owner, model, grantee, clock.wall_s())
        return json_response(ModelGrant(owner=owner, model=model, grantee=grantee, told=told))

    return routes


def _secret(made: MadeKey) -> Response:
    response = json_response(made, status=201)
    response.headers["cache-control"] = "no-store"
    return response


def _tenant(tenant: Tenant) -> TenantStatus:
    return TenantStatus(
        tenant=tenant.tenant,
        state=str(tenant.state),
        created_at_s=tenant.created_at_s,
        models=tenant.models,
        keys=tenant.keys,
        limits=StatedLimits(**structs.asdict(tenant.limits)),
    )


def _key(key: Key, now_s: int) -> KeyStatus:
    return KeyStatus(
        key_id=key.key_id,
        tenant=key.tenant,
        name=key.name,
        state=str(key.state(now_s)),
        scopes=key.scopes,
        models=key.models,
        created_at_s=key.created_at_s,
        expires_at_s=key.expires_at_s,
        revoked_at_s=key.revoked_at_s,
        last_used_at_s=key.last_used_at_s,
        successor=key.successor,
    )


def _grant(model: Model, grantee: str) -> ModelGrant:
    return ModelGrant(owner=model.tenant, model=model.model, grantee=grantee)
