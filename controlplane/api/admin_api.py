"""Serve the admin API: an admin's view of one tenant, and the changes that an admin makes. The activator authenticates
callers.

Routes that only one machine can answer are in `machine_api.py`.
"""

from typing import Final

from fastapi import APIRouter, Request, Response

from controlplane.api.types.admin_types import (
    Deleted,
    DeletedModel,
    Deploy,
    Deployed,
    Models,
    ModelStatus,
    Split,
    Status,
)
from controlplane.audit.audit_rows import RequireActor
from controlplane.clock import Clock
from controlplane.db.nul_characters import read_json
from controlplane.registry.registry import Registry
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.interfaces import ReplicaBackend
from controlplane.scaling.policy.scale_settings import ScaleChange, ScaleSettings
from controlplane.status.model_status import model_status
from kelvin.contracts.errors import Conflict, ModelNotFound, NotFound
from kelvin.contracts.serving.control_messages import Scope, scope_allows
from kelvin.contracts.serving.degradation_steps import Ladder
from kelvin.ipc.http_bodies import json_response
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_admin

NO_MODEL: Final = (NotFound, ModelNotFound)  # for a malformed name, and for an unknown model


def router(registry: Registry, backend: ReplicaBackend, changes: AdminOperations, clock: Clock) -> APIRouter:
    """Return the routes under `/admin/v1`. Each needs the scope `admin` and is about the caller's tenant only, except
    that `/status` also shows the installation to operators.
    """
    routes = APIRouter(prefix="/admin/v1")
    actor_of = RequireActor(Scope.ADMIN)
    replicas, outcomes, scaler = backend.replicas, backend.outcomes, backend.scaler

    @routes.get("/models", **route_docs(Models))
    async def models(request: Request) -> Response:
        principal = require_admin(request)
        found = registry.models(principal.tenant)
        return json_response(Models(models=tuple(model_status(model, replicas, outcomes) for model in found)))

    @routes.get("/status", **route_docs(Status))
    async def status(request: Request) -> Response:
        principal = require_admin(request)
        models = tuple(model_status(model, replicas, outcomes) for model in registry.models(principal.tenant))
        if not scope_allows(principal.scopes, Scope.OPERATOR):
            return json_response(Status(processes=(), cache=None, device=None, models=models))
        return json_response(await backend.build_status(models))

    @routes.get("/models/{model}", **route_docs(ModelStatus, *NO_MODEL))
    async def model(request: Request, model: str) -> Response:
        principal = require_admin(request)
        return json_response(model_status(registry.model(principal.tenant, model), replicas, outcomes))

    @routes.post("/models/{model}/deploy", **route_docs(Deployed, *NO_MODEL, Conflict, request_body=Deploy))
    async def deploy(request: Request, model: str) -> Response:
        actor = actor_of(request)
        body = await read_json(request, Deploy)
        version = await changes.deploy(actor, actor.tenant, model, body.version)
        return json_response(Deployed(model=model, version=version))

    @routes.put("/models/{model}/split", **route_docs(Split, *NO_MODEL, Conflict, request_body=Split))
    async def split(request: Request, model: str) -> Response:
        actor = actor_of(request)
        body = await read_json(request, Split)
        return json_response(Split(weights=await changes.split(actor, actor.tenant, model, body.weights)))

    @routes.put("/models/{model}/ladder", **route_docs(Ladder, *NO_MODEL, Conflict, request_body=Ladder))
    async def ladder(request: Request, model: str) -> Response:
        actor = actor_of(request)
        body = await read_json(request, Ladder)
        return json_response(await registry.set_ladder(actor, actor.tenant, model, body, clock.wall_s()))

    @routes.delete("/models/{model}", **route_docs(DeletedModel, *NO_MODEL, Conflict))
    async def delete_model(request: Request, model: str, force: bool = False) -> Response:
        actor = actor_of(request)
        keys = await changes.delete_model(actor, actor.tenant, model, force)
        return json_response(DeletedModel(model=model, versions=tuple(key.version for key in keys)))

    @routes.delete("/models/{model}/versions/{version}", **route_docs(Deleted, *NO_MODEL, Conflict))
    async def delete(request: Request, model: str, version: str) -> Response:
        actor = actor_of(request)
        key = await registry.delete(actor, actor.tenant, model, version, clock.wall_s(), replicas.is_present)
        if replicas.is_present(key):  # a request started it while the row was being written
            scaler.stop((key,))
        return json_response(Deleted(model=key.model, version=key.version))

    @routes.put("/models/{model}/scale", **route_docs(ScaleSettings, *NO_MODEL, request_body=ScaleChange))
    async def scale(request: Request, model: str) -> Response:
        actor = actor_of(request)
        body = await read_json(request, ScaleChange)
        return json_response(await changes.scale(actor, actor.tenant, model, body.stated_values()))

    return routes
