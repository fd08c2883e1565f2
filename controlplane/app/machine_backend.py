"""Build the backend of one machine: replicas are processes forked here, and the autoscaler decides how many run."""

from contextlib import AsyncExitStack
from functools import partial

from controlplane.api import machine_api
from controlplane.api.machine_api import MachineServices
from controlplane.app.control_plane_services import ControlPlaneServices
from controlplane.app.push_jobs import build_job_runner
from controlplane.knative.policy.pending_replicas import ANY_ZONE
from controlplane.scaling.interfaces import ReplicaBackend
from controlplane.scaling.kpa.autoscaler import Autoscaler
from controlplane.scaling.local.adopter import Adopter
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.footprints import Footprints
from controlplane.scaling.local.local_actuator import LocalActuator
from controlplane.scaling.local.metrics import RestoreMetrics, register_pending_metric, register_pool_metrics
from controlplane.scaling.local.replica_replacement import DamageLoop, ReplicaReplacement
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.start_problem import no_room
from controlplane.scaling.replicas import ReplicaTable
from controlplane.scaling.start_outcomes import StartOutcomes
from controlplane.scaling.warmth.prefetch_requests import Prefetcher
from controlplane.scaling.warmth.start_forecasts import StartForecaster
from controlplane.scaling.warmth.warmth_cost import WarmthCost
from controlplane.status.sibling_processes import SiblingProcesses
from kelvin.ipc.zygote_client import ZygoteClient


async def build_machine_backend(stack: AsyncExitStack, services: ControlPlaneServices) -> ReplicaBackend:
    """Build the backend of one machine. On return live replicas are adopted and in the feed."""
    settings, clock, tasks = services.settings, services.clock, services.tasks
    registry, feed = services.registry, services.feed
    directory, telemetry = services.directory, services.telemetry
    zygote = ZygoteClient(directory)
    peers = SiblingProcesses(directory, zygote, filters=settings.filters)
    stack.push_async_callback(peers.close)
    device = CpuShare(settings.cores, settings.threads_cap, settings.kv_bytes)
    table = ReplicaTable(settings.device_slots)

    fleet = Fleet(directory, zygote, table, clock, tasks)
    stack.push_async_callback(fleet.close)
    await stack.enter_async_context(tasks)  # left before the fleet closes what the tasks use
    pool = StandbyPool(fleet, settings.sizing, Footprints(fleet, lambda: zygote.pid), settings.cores)
    register_pool_metrics(telemetry.page, pool)
    actuator = LocalActuator(fleet, pool, feed, device, settings.drain_s, settings.term_s)
    forecasts = StartForecaster(registry.find, peers.whereabouts, feed, clock, tasks, telemetry.page)
    warmth_cost = WarmthCost(
        services.price_book, forecasts.history, clock, kv_bytes=settings.kv_bytes, memory_price=settings.memory_price
    )
    autoscaler = Autoscaler(registry, actuator, clock, tasks, warmth_cost.level_changes, feed)
    register_pending_metric(telemetry.page, lambda: {(pool.state().device, ANY_ZONE, "no"): autoscaler.pending})
    outcomes = StartOutcomes(registry, feed, tasks)
    autoscaler.on_slot_shortage_changed = partial(outcomes.set_slot_shortage, no_room(table.slots))
    actuator.add_listener(autoscaler)
    actuator.add_listener(outcomes)
    actuator.add_listener(RestoreMetrics(telemetry, table))
    actuator.add_listener(forecasts)
    replacement = ReplicaReplacement(fleet, actuator)
    actuator.add_listener(replacement)
    actuator.add_start_listener(forecasts.on_start_accepted)
    actuator.add_slot_listener(autoscaler.assign_free_slots)
    prefetcher = Prefetcher(peers.prefetch, tasks)
    registry.on_alias_moved = prefetcher.on_alias_moved
    autoscaler.on_start_waiting = actuator.on_start_waiting = prefetcher.on_start_waiting
    damages = DamageLoop(peers.damaged_pids, fleet, actuator, telemetry.page)
    adopter = Adopter(directory, fleet, pool, actuator, feed, lambda key: registry.find(key) is not None)
    await adopter.sweep()
    pool.balance()
    tasks.start_loop("standbys", pool.run)
    tasks.start_loop("adopter", adopter.run)
    tasks.start_loop("autoscaler", autoscaler.run)
    tasks.start_loop("damages", damages.run)

    shown = MachineServices(
        registry, table, outcomes, autoscaler, peers, forecasts, warmth_cost, clock, pool, replacement
    )
    return ReplicaBackend(
        replicas=table,
        outcomes=outcomes,
        scaler=autoscaler,
        jobs=build_job_runner(fleet, pool, feed),
        is_ready=peers.zygote_answers,
        build_status=partial(machine_api.machine_status, shown),
        record_answers=forecasts.record_answers,
        find_live_replicas=lambda: [replica.runtime_id for replica in table],
        routers=(machine_api.router(shown, services.audit_log, telemetry),),
        find_start_obstacle=None,
    )
