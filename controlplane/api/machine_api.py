"""Serve the admin API's routes about one machine: its cache, start forecasts, idle levels, restarts and metrics.

`/metrics` merges the pages of all processes, for a scraper that has a key but no access to the sockets. Only operators
see data of the whole installation; `admin_api.py` enforces that for `/status`.
"""

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from controlplane.api.types.admin_types import (
    CacheCheck,
    CacheStatus,
    DeviceStatus,
    ModelStatus,
    PendingReplicas,
    Renewal,
    Status,
)
from controlplane.audit.audit_entry_policy import AuditAction, created_fields
from controlplane.audit.audit_log import AuditLog
from controlplane.audit.audit_rows import RequireActor
from controlplane.clock import Clock
from controlplane.db.nul_characters import read_json
from controlplane.knative.policy.pending_replicas import ANY_ZONE
from controlplane.registry.registry import Registry
from controlplane.scaling.kpa.autoscaler import Autoscaler
from controlplane.scaling.local.replica_replacement import ReplicaReplacement
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import SERVING, ReplicaState
from controlplane.scaling.replicas import ReplicaTable
from controlplane.scaling.start_outcomes import StartOutcomes
from controlplane.scaling.warmth.start_forecasts import StartForecaster
from controlplane.scaling.warmth.warmth_cost import WarmthCost
from controlplane.status.idle_explanation import IdleModel, explain_idle
from controlplane.status.model_status import memory, model_status, pool_status
from controlplane.status.sibling_processes import Evict, SiblingProcesses, limit_to_tenant
from controlplane.status.start_explanation import Starts, forecast_starts
from kelvin.contracts.errors import Conflict, ModelNotFound, NotFound
from kelvin.contracts.serving.control_messages import Scope
from kelvin.ipc.http_bodies import empty_response, json_response
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_admin, require_scope
from kelvin.telemetry.policy.exposition import CONTENT_TYPE, merge, render
from kelvin.telemetry.policy.instruments import MetricFamily, MetricKind, series_by_label
from kelvin.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class MachineServices:
    """The services behind the machine routes."""

    registry: Registry
    table: ReplicaTable
    outcomes: StartOutcomes
    autoscaler: Autoscaler
    peers: SiblingProcesses
    forecasts: StartForecaster
    warmth_cost: WarmthCost
    clock: Clock
    pool: StandbyPool
    replacement: ReplicaReplacement


async def machine_status(services: MachineServices, models: tuple[ModelStatus, ...]) -> Status:
    """Return the status of the machine: its processes, devices and cache, and these models."""
    peers, table, pool = services.peers, services.table, services.pool
    processes, exits, cache, disk = await asyncio.gather(
        peers.statuses(), peers.replica_exits(), peers.try_cache_status(), peers.disk()
    )
    await pool.footprints.refresh()  # after the call to the zygote, which makes its pid known
    device = DeviceStatus(
        slots=table.slots,
        held=table.held_slots,
        standbys=table.count(ReplicaState.STANDBY),
        pools=(pool_status(pool),),
        zygote=memory(pool.footprints.zygote),
    )
    # The wait is unknown: it ends when another version frees a slot.
    row = PendingReplicas(device=pool.state().device, zone=ANY_ZONE, spot="no", replicas=services.autoscaler.pending)
    return Status(
        processes=processes, cache=cache, device=device, models=models, pending=(row,), replica_exits=exits, disk=disk
    )


def router(services: MachineServices, audit_log: AuditLog, telemetry: Telemetry) -> APIRouter:
    """Return the routes under `/admin/v1`. `/cache`, `/cache/check` and `/metrics` need the scope `operator`. The
    others need `admin` and are about the caller's tenant only.
    """
    routes = APIRouter(prefix="/admin/v1")
    operator_of, actor_of = require_scope(Scope.OPERATOR), RequireActor(Scope.ADMIN)
    registry, table, peers, replacement = services.registry, services.table, services.peers, services.replacement
    restart_lock = asyncio.Lock()  # no other restart begins between an audit entry and the restart it announces

    @routes.get("/models/{model}/starts", **route_docs(Starts, NotFound, ModelNotFound))
    async def starts(request: Request, model: str) -> Response:
        principal = require_admin(request)
        return json_response(await forecast_starts(registry.model(principal.tenant, model), table, services.forecasts))

    @routes.get("/models/{model}/idle", **route_docs(IdleModel, NotFound, ModelNotFound))
    async def idle(request: Request, model: str) -> Response:
        found = registry.model(require_admin(request).tenant, model)
        return json_response(explain_idle(found, table, services.autoscaler, services.warmth_cost, services.clock))

    @routes.post("/models/{model}/stop", **route_docs(ModelStatus, NotFound, ModelNotFound, status=202))
    async def stop(request: Request, model: str) -> Response:
        actor = actor_of(request)
        found = await registry.stop(actor, actor.tenant, model, services.clock.wall_s())
        services.autoscaler.stop(tuple(version.key for version in found.versions))
        return json_response(model_status(found, table, services.outcomes), status=202)

    @routes.post("/models/{model}/restart", **route_docs(Renewal, NotFound, ModelNotFound, Conflict, status=202))
    async def restart(request: Request, model: str) -> Response:
        actor = actor_of(request)
        found = registry.model(actor.tenant, model)
        async with restart_lock:
            replacement.check(found)  # a refused restart gets no audit entry
            await audit_log.add_entry(actor, actor.tenant, AuditAction.MODEL_RESTARTED, model)
            return json_response(replacement.begin(found), status=202)

    @routes.get("/models/{model}/restart", **route_docs(Renewal, NotFound, ModelNotFound))
    async def restarted(request: Request, model: str) -> Response:
        return json_response(replacement.state(registry.model(require_admin(request).tenant, model)))

    @routes.get("/cache", **route_docs(CacheStatus, scope=Scope.OPERATOR))
    async def cache(request: Request) -> Response:
        operator_of(request)
        return Response(await peers.cache_state(), media_type="application/json")

    @routes.post("/cache/evict", **route_docs(None, NotFound, Conflict, status=204, request_body=Evict))
    async def evict(request: Request) -> Response:
        actor = actor_of(request)
        eviction = limit_to_tenant(actor.tenant, await read_json(request, Evict))
        changed = created_fields(tier=eviction.tier, version=eviction.version)
        async with audit_log.record_around(actor, actor.tenant, AuditAction.CACHE_EVICTED, "cache", changed):
            await peers.evict(eviction)
        return empty_response()

    @routes.post("/cache/check", **route_docs(CacheCheck, scope=Scope.OPERATOR))
    async def check(request: Request) -> Response:
        operator_of(request)
        return json_response(await peers.check_cache())

    @routes.get("/metrics", **route_docs(str, scope=Scope.OPERATOR))
    async def metrics(request: Request) -> Response:
        operator_of(request)
        serving = (replica.runtime_id for replica in table if replica.state in SERVING)
        page_by_process = await peers.metrics(serving)
        reachable = series_by_label(
            (name, page is not None) for name, page in page_by_process.items() if name in peers.names
        )
        up = render(
            (MetricFamily("kelvin_up", "Whether a process answers.", MetricKind.GAUGE, ("peer",), reachable),),
            "controlplane",
        )
        pages = (up, telemetry.render_page(), *(page for page in page_by_process.values() if page is not None))
        return Response(merge(pages), media_type=CONTENT_TYPE)

    return routes
