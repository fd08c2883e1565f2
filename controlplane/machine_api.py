"""The admin API's routes about one machine: its processes, devices and cache, why a model is as warm as it is, restarts
of a model's replicas, and all processes' metrics as one page, for a scraper that has a key and no way to the sockets.

What is the whole installation's (its processes, its devices, its cache) is shown to operators alone; of `/status`
`admin_api` sees to that.
"""

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from contracts.control import Scope
from contracts.errors import Conflict, ModelNotFound, NotFound
from controlplane.answers import CacheCheck, CacheStatus, DeviceStatus, ModelStatus, PendingReplicas, Renewal, Status
from controlplane.audit import ActorOf
from controlplane.autoscaler import Autoscaler
from controlplane.clock import Clock
from controlplane.economy import Economy
from controlplane.explained import Starts, starts_of
from controlplane.forecasts import Forecasts
from controlplane.idle_explained import IdleModel, idle_of
from controlplane.nul import read
from controlplane.outcomes import Outcomes
from controlplane.peers import Evict, Peers, own_eviction
from controlplane.policy.pending import ANY
from controlplane.policy.replica_life import SERVING, ReplicaState
from controlplane.policy.trail import Action, made
from controlplane.registry import Registry
from controlplane.replacement import ReplicaReplacement
from controlplane.replicas import ReplicaTable
from controlplane.scaling.pool import StandbyPool
from controlplane.status import memory, model_status, pool_status
from controlplane.trail import Trail
from service.bodies import answer, nothing
from service.openapi import described
from service.principal import admin_of, holder_of
from telemetry.policy.exposition import CONTENT_TYPE, merge, render
from telemetry.policy.instruments import Family, Kind, by
from telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Shown:
    """What the routes look at."""

    registry: Registry
    table: ReplicaTable
    outcomes: Outcomes
    autoscaler: Autoscaler
    peers: Peers
    forecasts: Forecasts
    economy: Economy
    clock: Clock
    pool: StandbyPool
    replacement: ReplicaReplacement


async def machine_status(shown: Shown, models: tuple[ModelStatus, ...]) -> Status:
    """The machine's processes, devices and cache, with these models."""
    peers, table, pool = shown.peers, shown.table, shown.pool
    processes, exits, cache, disk = await asyncio.gather(
        peers.statuses(), peers.replica_exits(), peers.try_cache_status(), peers.disk()
    )
    await pool.footprints.refresh()  # after the zygote was asked: who it is, is known
    device = DeviceStatus(
        slots=table.slots,
        held=table.held,
        standbys=table.count(ReplicaState.STANDBY),
        pools=(pool_status(pool),),
        zygote=memory(pool.footprints.zygote),
    )
    # Nobody knows how long: a slot comes free when another version leaves it.
    row = PendingReplicas(device=pool.state().device, zone=ANY, spot="no", replicas=shown.autoscaler.pending)
    return Status(
        processes=processes,
        cache=cache,
        device=device,
        models=models,
        pending=(row,),
        replica_exits=exits,
        disk=disk,
    )


def router(shown: Shown, trail: Trail, telemetry: Telemetry) -> APIRouter:
    """Routes under `/admin/v1`. `GET /cache`, `POST /cache/check` and `GET /metrics`, which shows the pages of all
    processes, need the scope `operator`. The others need `admin` and are about the caller's tenant only.
    """
    routes = APIRouter(prefix="/admin/v1")
    operator_of, actor_of = holder_of(Scope.OPERATOR), ActorOf(Scope.ADMIN)
    registry, table, peers, replacement = shown.registry, shown.table, shown.peers, shown.replacement
    turn = asyncio.Lock()  # no other restart begins between an entry and its own

    @routes.get("/models/{model}/starts", **described(Starts, NotFound, ModelNotFound))
    async def starts(request: Request, model: str) -> Response:
        principal = admin_of(request)
        return answer(await starts_of(registry.model(principal.tenant, model), table, shown.forecasts))

    @routes.get("/models/{model}/idle", **described(IdleModel, NotFound, ModelNotFound))
    async def idle(request: Request, model: str) -> Response:
        found = registry.model(admin_of(request).tenant, model)
        return answer(idle_of(found, table, shown.autoscaler, shown.economy, shown.clock))

    @routes.post("/models/{model}/stop", **described(ModelStatus, NotFound, ModelNotFound, status=202))
    async def stop(request: Request, model: str) -> Response:
        principal = actor_of(request)
        found = await registry.stop(principal, principal.tenant, model, shown.clock.wall_s())
        shown.autoscaler.stop(tuple(version.key for version in found.versions))
        return answer(model_status(found, table, shown.outcomes), status=202)

    @routes.post("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound, Conflict, status=202))
    async def restart(request: Request, model: str) -> Response:
        by = actor_of(request)
        found = registry.model(by.tenant, model)
        async with turn:
            replacement.check(found)  # what is refused has no entry
            await trail.note(by, by.tenant, Action.MODEL_RESTARTED, model)
            return answer(replacement.begin(found), status=202)

    @routes.get("/models/{model}/restart", **described(Renewal, NotFound, ModelNotFound))
    async def restarted(request: Request, model: str) -> Response:
        return answer(replacement.state(registry.model(admin_of(request).tenant, model)))

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

    @routes.get("/metrics", **described(str, scope=Scope.OPERATOR))
    async def metrics(request: Request) -> Response:
        operator_of(request)
        serving = (replica.runtime_id for replica in table if replica.state in SERVING)
        found = await peers.metrics(serving)
        heard = by((name, page is not None) for name, page in found.items() if name in peers.names)
        up = render((Family("kelvin_up", "Whether a process answers.", Kind.GAUGE, ("peer",), heard),), "controlplane")
        pages = (up, telemetry.text(), *(page for page in found.values() if page is not None))
        return Response(merge(pages), media_type=CONTENT_TYPE)

    return routes
