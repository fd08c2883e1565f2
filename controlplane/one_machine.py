"""The versions of one machine run as processes that are forked here, and how many there are is decided here."""

from contextlib import AsyncExitStack
from functools import partial

from controlplane import machine_api
from controlplane.autoscaler import Autoscaler
from controlplane.economy import Economy
from controlplane.forecasts import Forecasts
from controlplane.installation import Installation
from controlplane.jobs import job_desk
from controlplane.machine_api import Shown
from controlplane.meters import RestoreMeters, show_pending, show_pool
from controlplane.outcomes import Outcomes
from controlplane.peers import Peers
from controlplane.policy.pending import ANY
from controlplane.policy.start_problem import no_room
from controlplane.prefetch import Prefetcher
from controlplane.replacement import DamageLoop, ReplicaReplacement
from controlplane.replicas import ReplicaTable
from controlplane.running import Running
from controlplane.scaling.adopt import Adopter
from controlplane.scaling.device import Device
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.footprints import Footprints
from controlplane.scaling.local import LocalActuator
from controlplane.scaling.pool import StandbyPool
from service.zygote import ZygoteClient


async def one_machine(ladder: AsyncExitStack, inst: Installation) -> Running:
    """Put the control plane of one machine together. On return living replicas are adopted and in the feed."""
    settings, clock, registry, feed, tasks = inst.settings, inst.clock, inst.registry, inst.feed, inst.tasks
    directory, telemetry = inst.directory, inst.telemetry
    zygote = ZygoteClient(directory)
    peers = Peers(directory, zygote, filters=settings.filters)
    ladder.push_async_callback(peers.close)
    device = Device(settings.cores, settings.threads_cap, settings.kv_bytes)
    table = ReplicaTable(settings.device_slots)

    fleet = Fleet(directory, zygote, table, clock, tasks)
    ladder.push_async_callback(fleet.close)
    await ladder.enter_async_context(tasks)  # left before the fleet lets go of what the tasks use
    pool = StandbyPool(fleet, settings.sizing, Footprints(fleet, lambda: zygote.pid), settings.cores)
    show_pool(telemetry.page, pool)
    actuator = LocalActuator(fleet, pool, feed, device, settings.drain_s, settings.term_s)
    forecasts = Forecasts(registry.find, peers.whereabouts, feed, clock, tasks, telemetry.page)
    economy = Economy(
        inst.book, forecasts.history, clock, kv_bytes=settings.kv_bytes, memory_price=settings.memory_price
    )
    autoscaler = Autoscaler(registry, actuator, clock, tasks, economy.steps, feed)
    show_pending(telemetry.page, lambda: {(pool.state().device, ANY, "no"): autoscaler.pending})
    outcomes = Outcomes(registry, feed, tasks)
    autoscaler.on_room_changed = partial(outcomes.room_changed, no_room(table.slots))
    actuator.listen(autoscaler)
    actuator.listen(outcomes)
    actuator.listen(RestoreMeters(telemetry, table))
    actuator.listen(forecasts)
    replacement = ReplicaReplacement(fleet, actuator)
    actuator.listen(replacement)
    actuator.on_start(forecasts.starting)
    actuator.on_room(autoscaler.room)
    prefetcher = Prefetcher(peers.prefetch, tasks)
    registry.on_named = prefetcher.named
    autoscaler.on_placing = actuator.on_placing = prefetcher.placing
    damages = DamageLoop(peers.damaged_pids, fleet, actuator, telemetry.page)
    adopter = Adopter(directory, fleet, pool, actuator, feed, lambda key: registry.find(key) is not None)
    await adopter.sweep()
    pool.balance()
    tasks.start_loop("standbys", pool.run)
    tasks.start_loop("adopter", adopter.run)
    tasks.start_loop("autoscaler", autoscaler.run)
    tasks.start_loop("damages", damages.run)

    shown = Shown(registry, table, outcomes, autoscaler, peers, forecasts, economy, clock, pool, replacement)
    return Running(
        replicas=table,
        outcomes=outcomes,
        decider=autoscaler,
        jobs=job_desk(fleet, pool, feed),
        ready=peers.zygote_answers,
        status=partial(machine_api.machine_status, shown),
        answered=forecasts.answered,
        alive=lambda: [replica.runtime_id for replica in table],
        routers=(machine_api.router(shown, inst.trail, telemetry),),
        obstacle=None,
    )
