"""The admin API: an admin's view of one tenant, and the few things they change. The activator authenticates them.

What is the whole installation's (its processes, its devices, its cache) is shown to operators alone.
"""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from contracts.control import Scope
from contracts.errors import Conflict, ModelNotFound, NotFound
from contracts.ladder import Ladder
from contracts.scopes import allows
from controlplane.answers import (
    CacheCheck,
    CacheStatus,
    Deleted,
    DeletedModel,
    Deploy,
    Deployed,
    DeviceStatus,
    Models,
    ModelStatus,
    Split,
    Status,
)
from controlplane.audit import ActorOf
from controlplane.autoscaler import Autoscaler
from controlplane.bodies import answer, nothing, read
from controlplane.clock import Clock
from controlplane.economy import Economy
from controlplane.explained import Starts, starts_of
from controlplane.facts import ScaleChange, ScaleSettings
from controlplane.forecasts import Forecasts
from controlplane.foresight import Foresight
from controlplane.idle_explained import IdleModel, idle_of
from controlplane.outcomes import Outcomes
from controlplane.peers import Evict, Peers, own_eviction
from controlplane.policy.replica_life import ReplicaState
from controlplane.policy.trail import Action, made
from controlplane.registry import Registry
from controlplane.removal import Removal
from controlplane.replicas import ReplicaTable
from controlplane.scaling.pool import StandbyPool
from controlplane.status import memory, model_status, pool_status
from controlplane.trail import Trail
from service.openapi import described
from service.principal import admin_of, holder_of

NO_MODEL: Final = (NotFound, ModelNotFound)  # of a name that is none, and of one that nobody has


def router(
    registry: Registry,
    table: ReplicaTable,
    outcomes: Outcomes,
    autoscaler: Autoscaler,
    peers: Peers,
    removal: Removal,
    forecasts: Forecasts,
    economy: Economy,
    clock: Clock,
    pool: StandbyPool,
    foresight: Foresight,
    trail: Trail,
) -> APIRouter:
    """Routes under `/admin/v1`. Every one needs the scope `admin`, and speaks of the caller's tenant only."""
    routes = APIRouter(prefix="/admin/v1")
    operator_of, actor_of = holder_of(Scope.OPERATOR), ActorOf(Scope.ADMIN)

    @routes.get("/status", **described(Status))
    async def status(request: Request) -> Response:
        principal = admin_of(request)
        models = tuple(model_status(model, table, outcomes) for model in registry.models(principal.tenant))
        if not allows(principal.scopes, Scope.OPERATOR):
            return answer(Status(processes=(), cache=None, device=None, models=models))
        processes, cache = await asyncio.gather(peers.statuses(), peers.try_cache_status())
        await pool.footprints.refresh()  # after the zygote was asked: who it is, is known
        device = DeviceStatus(
            slots=table.slots,
            held=table.held,
            standbys=table.count(ReplicaState.STANDBY),
            pools=(pool_status(pool),),
            zygote=memory(pool.footprints.zygote),
        )
        return answer(Status(processes=processes, cache=cache, device=device, models=models))

    @routes.get("/models", **described(Models))
    async def models(request: Request) -> Response:
        principal = admin_of(request)
        found = registry.models(principal.tenant)
        return answer(Models(models=tuple(model_status(model, table, outcomes) for model in found)))

    @routes.get("/models/{model}", **described(ModelStatus, *NO_MODEL))
    async def model(request: Request, model: str) -> Response:
        principal = admin_of(request)
        return answer(model_status(registry.model(principal.tenant, model), table, outcomes))

    @routes.get("/models/{model}/starts", **described(Starts, *NO_MODEL))
    async def starts(request: Request, model: str) -> Response:
        principal = admin_of(request)
        return answer(await starts_of(registry.model(principal.tenant, model), table, forecasts))

    @routes.get("/models/{model}/idle", **described(IdleModel, *NO_MODEL))
    async def idle(request: Request, model: str) -> Response:
        principal = admin_of(request)
        return answer(idle_of(registry.model(principal.tenant, model), table, autoscaler, economy, clock, foresight))

    @routes.post("/models/{model}/deploy", **described(Deployed, *NO_MODEL, Conflict, takes=Deploy))
    async def deploy(request: Request, model: str) -> Response:
        principal = actor_of(request)
        wanted = await read(request, Deploy)
        version = await registry.deploy(principal, principal.tenant, model, wanted.version, clock.wall_s())
        autoscaler.tick()  # a minimum moves with the alias
        return answer(Deployed(model=model, version=version))

    @routes.put("/models/{model}/split", **described(Split, *NO_MODEL, Conflict, takes=Split))
    async def split(request: Request, model: str) -> Response:
        principal = actor_of(request)
        wanted = await read(request, Split)
        weights = await registry.split(principal, principal.tenant, model, wanted.weights, clock.wall_s())
        autoscaler.tick()  # a minimum is every version's that is named
        return answer(Split(weights=weights))

    @routes.put("/models/{model}/ladder", **described(Ladder, *NO_MODEL, Conflict, takes=Ladder))
    async def ladder(request: Request, model: str) -> Response:
        principal = actor_of(request)
        wanted = await read(request, Ladder)
        return answer(await registry.set_ladder(principal, principal.tenant, model, wanted, clock.wall_s()))

    @routes.delete("/models/{model}", **described(DeletedModel, *NO_MODEL, Conflict))
    async def delete_model(request: Request, model: str, force: bool = False) -> Response:
        principal = actor_of(request)
        keys = await removal.model(principal, principal.tenant, model, force)
        return answer(DeletedModel(model=model, versions=tuple(key.version for key in keys)))

    @routes.delete("/models/{model}/versions/{version}", **described(Deleted, *NO_MODEL, Conflict))
    async def delete(request: Request, model: str, version: str) -> Response:
        principal = actor_of(request)
        key = await registry.delete(principal, principal.tenant, model, version, clock.wall_s(), removal.is_present)
        if removal.is_present(key):  # asked for while the row was being written
            autoscaler.stop((key,))
        return answer(Deleted(model=key.model, version=key.version))

    @routes.put("/models/{model}/scale", **described(ScaleSettings, *NO_MODEL, takes=ScaleChange))
    async def scale(request: Request, model: str) -> Response:
        principal = actor_of(request)
        change = await read(request, ScaleChange)
        scale = await registry.rescale(principal, principal.tenant, model, change, clock.wall_s())
        if change.min:
            autoscaler.resume(tuple(version.key for version in registry.model(principal.tenant, model).versions))
        autoscaler.tick()  # bounds hold from now on, not from the next beat
        return answer(scale)

    @routes.post("/models/{model}/stop", **described(ModelStatus, *NO_MODEL, status=202))
    async def stop(request: Request, model: str) -> Response:
        principal = actor_of(request)
        found = registry.model(principal.tenant, model)
        await trail.note(principal, principal.tenant, Action.MODEL_STOPPED, model)
        autoscaler.stop(tuple(version.key for version in found.versions))
        return answer(model_status(found, table, outcomes), status=202)

    @routes.get("/cache", **described(CacheStatus, scope=Scope.OPERATOR))
    async def cache(request: Request) -> Response:
        operator_of(request)
        return Response(await peers.cache_state(), media_type="application/json")

    @routes.post("/cache/evict", **described(None, NotFound, Conflict, status=204, takes=Evict))
    async def evict(request: Request) -> Response:
        principal = actor_of(request)
        wanted = own_eviction(principal.tenant, await read(request, Evict))
        changed = made(tier=wanted.tier, version=wanted.version)
        async with trail.noted(principal, principal.tenant, Action.CACHE_EVICTED, "cache", changed):
            await peers.evict(wanted)
        return nothing()

    @routes.post("/cache/check", **described(CacheCheck, scope=Scope.OPERATOR))
    async def check(request: Request) -> Response:
        operator_of(request)
        return answer(await peers.check_cache())

    return routes
