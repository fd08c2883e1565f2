"""The composition root of a standby and of the runtime that it may become: what is made of what, and in which order."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import torch
from fastapi import FastAPI
from starlette.types import ASGIApp

from contracts.control import batch_of
from contracts.errors import Refused
from contracts.filters import SOCKET
from contracts.jobs import Bind, GateFacts, GateJob, Pod, SealAttestation, SealJob
from contracts.push import KeepSeal
from contracts.roles import Role, Rules
from runtime import jobs
from runtime.api import ServingApi
from runtime.control_api import Orders, attach, build_orders
from runtime.dependencies import LEDGER, SEALS
from runtime.gpu_watch import GpuWatch
from runtime.memory import SPARE_BYTES, bound_memory
from runtime.metering import MeterPage
from runtime.orphans import Orphans, orphanage
from runtime.policy.roles import ORDERS, RULES
from runtime.predictor.session import installed
from runtime.replica import Replica, Work
from runtime.restore import restore
from runtime.screening import FilterProcess
from runtime.serving import Served, Wiring
from runtime.settings import LISTEN, STANDBY_LISTEN, RuntimeSettings
from runtime.warmup import WarmUp
from runtime.weights import Acquire, Weights, device_of, engine_of
from service.client import ServiceClient
from service.inner import open_inner
from service.jobs import GATE_BYTES, seal_bytes
from service.loops import Loops
from service.unix import SocketDirectory
from service.way import Way
from spool.shipper import Post
from weightcache import client
from weightcache.device import Lanes, checksum_in, copy_to_device, tensors

log = logging.getLogger(__name__)

_USAGE: Final = "/internal/v1/usage/requests"
_SHIP_S: Final = LEDGER.timeout_s
_WARM_AFTER_S: Final = 0.25  # a standby that was forked for a waiting request is bound by then
_LAST_FRAMES_S: Final = 5  # for what is answered already and not yet read
_LAST_RECEIPTS_S: Final = 1.0  # for activators to say that they recorded it; less than the lifeline's grace
_PROVEN_LOOK_S: Final = 0.5
_SEAL_PAUSES_S: Final = (1.0, 5.0, 25.0)  # between tries
_SEAL_S: Final = SEALS.timeout_s
Keep = Callable[[KeepSeal], Awaitable[None]]


async def serve(
    runtime_id: str,
    settings: RuntimeSettings,
    directory: SocketDirectory,
    listener: socket.socket,
    meter: MeterPage,
    control: FastAPI,
    stop: asyncio.Event,
    pod: Pod | None = None,
    gpus: GpuWatch | None = None,
    agent: SocketDirectory | None = None,
) -> None:
    """Park, take a version when told to, or at once where the `pod` is for one, serve, until `stop` or a drain, which
    an unhealthy one of `gpus` begins. `agent` is where the cache agent listens, if not in `directory`. Raises `Refused`
    after a failure.
    """
    own, parked = (None, None) if pod is None else (pod.bind, pod.parked)
    async with (
        open_inner(directory, settings.between, Role.RUNTIME, LISTEN if parked is None else STANDBY_LISTEN) as inner,
        filters_over(directory, settings.filters) as filters,
        orphanage(
            settings.spools, runtime_id, _poster(inner.ways.to(settings.between.control, Role.CONTROLPLANE))
        ) as orphans,
    ):
        url = inner.url if parked is None else ""  # where a pod serves others know
        work = work_over(agent or directory, settings.restore_s, filters)
        replica = Replica(runtime_id, meter, work, url, step_s=settings.step_s)
        keep = keeper(inner.ways.to(settings.between.snapshotter, Role.SNAPSHOTTER))
        attach(control, replica)
        api = ServingApi(replica, orphans, control, in_pod=pod is not None)
        beyond: tuple[ASGIApp, Rules] = api, RULES
        if parked is not None:
            beyond = build_orders(Orders(parked, replica, stop, settings.restore_s), replica), ORDERS
        try:
            async with Loops() as loops, asyncio.TaskGroup() as tasks:
                loops.start("engine watch", replica.watch)
                keeping = partial(keep_what_was_recorded, replica, keep)
                loops.start("known answers", keeping, takes_readiness=False)  # others record them again
                if gpus is not None:
                    loops.start("GPU watch", partial(gpus.run, replica.drain))
                beside = (
                    tasks.create_task(replica.warm_up(_WARM_AFTER_S), name="warm up"),
                    tasks.create_task(_drain_with(stop, replica, settings), name="drain"),
                )
                ended = asyncio.Event()
                tasks.create_task(_end_with(replica, orphans, ended), name="end")
                if own is not None:
                    tasks.create_task(_take(replica, own), name="take")
                await inner.serve(api, listener, beyond[1], ended, _LAST_FRAMES_S, beyond=beyond[0])
                await loops.close()
                for task in beside:
                    task.cancel()
        finally:
            await replica.close()
    if replica.failure is not None:
        raise Refused(replica.failure)


@asynccontextmanager
async def filters_over(directory: SocketDirectory, on: bool) -> AsyncIterator[FilterProcess | None]:
    """The process of the filters, None where the installation runs none."""
    if not on:
        yield None
        return
    client = ServiceClient(directory, SOCKET, "the filters")
    try:
        yield FilterProcess(client, asyncio.get_running_loop())
    finally:
        await client.close()


def work_over(directory: SocketDirectory, timeout_s: float, filters: FilterProcess | None = None) -> Work:
    """What this replica can do, over the real weight cache."""
    lanes = Lanes()

    def acquire_on(device: torch.device, *, progressive: bool) -> Acquire:
        def on_device(lease: client.Lease, expected: str | None) -> Weights:
            there = copy_to_device(lease, lanes.to(device), expected)
            checksum = there.checksum  # `renew` must not hold the arena
            on_host = partial(tensors, lease)
            return Weights(lease, there.tensors, checksum, lambda: on_device(lease, checksum), on_host)

        def acquire(tenant: str, version: str) -> Weights:
            engines = engines_on(device)
            lease = client.acquire(directory, tenant, version, timeout_s, engines, progressive=progressive)
            if device.type == "cpu":
                return Weights(lease, tensors(lease))
            try:
                return on_device(lease, checksum_in(lease.attestations))
            except BaseException:
                lease.close()
                raise

        return acquire

    def do_restore(request: Bind, wiring: Wiring) -> Served:
        if filters is not None:
            filters.tenant = request.tenant
        device = device_of(request.device_class)
        acquire = acquire_on(device, progressive=True)

        def acquire_bounded(tenant: str, version: str) -> Weights:
            weights = acquire(tenant, version)
            if device.type == "cpu":  # drivers of a GPU map what is none of this process's memory
                # Weights may be copied where they don't lie as they are computed over.
                bound_memory(weights.lease.manifest.total_bytes + request.kv_bytes + SPARE_BYTES)
            return weights

        return restore(request, wiring, acquire_bounded, filters)

    # A job computes on the CPU alone, and no later work: its process ends with it.
    def do_gate(job: GateJob) -> GateFacts:
        bound_memory(GATE_BYTES)
        return jobs.gate(job)

    def do_seal(job: SealJob) -> SealAttestation:
        bound_memory(seal_bytes(job))
        if filters is not None:
            filters.tenant = job.tenant
        acquire = acquire_on(torch.device("cpu"), progressive=False)
        return jobs.seal(job, acquire, for_devices=lanes.has_device, filters=filters)

    return Work(restore=do_restore, gate=do_gate, seal=do_seal, warm_up=(*WarmUp().steps, lanes.prepare))


def engines_on(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return (library, device) of each engine that this process may become. A lease brings the known answers of one."""
    predicting = installed()
    return (engine_of(device),) if predicting is None else (engine_of(device), (predicting, "cpu"))


async def keep_what_was_recorded(replica: Replica, keep: Keep) -> None:
    """Have the snapshotter keep the known answers that this replica recorded, once it gave them again.

    They become a seal of the version, which the snapshotter signs. Nothing waits for it: if it can't be reached, the
    next start records them anew. Returns once there is nothing to do: all was known before, it is kept, or that was
    tried often enough.
    """
    while True:
        await asyncio.sleep(_PROVEN_LOOK_S)
        if not replica.to_prove:
            break
    seal = replica.recorded
    if seal is None:
        return
    told = {"tenant": seal.tenant, "version": seal.seal.version}
    for pause_s in (*_SEAL_PAUSES_S, None):
        try:
            await keep(seal)
        except Refused as refused:
            log.warning("known answers were not kept", extra={**told, "why": refused.failure.message})
            if pause_s is None or not refused.failure.retryable:
                return
            await asyncio.sleep(pause_s)
        else:
            log.info("known answers of this engine are kept", extra=told)
            return


def keeper(way: Way) -> Keep:
    """Over the way to the snapshotter."""

    async def keep(found: KeepSeal) -> None:
        client = ServiceClient.by(way, "the snapshotter", limit=1)
        try:
            await client.call("POST", "/internal/v1/seals", type(None), body=found, timeout_s=_SEAL_S)
        finally:
            await client.close()

    return keep


async def _take(replica: Replica, own: Bind) -> None:
    """Bind. The replica keeps what went wrong, and ends by it."""
    try:
        await replica.bind(own)
    except Refused:
        return
    except Exception:
        log.exception("bind")


async def _end_with(replica: Replica, orphans: Orphans, ended: asyncio.Event) -> None:
    """Nothing is in flight: what was answered a moment ago may yet be said to be recorded."""
    await replica.over.wait()
    await orphans.settled(_LAST_RECEIPTS_S)
    ended.set()


async def _drain_with(stop: asyncio.Event, replica: Replica, settings: RuntimeSettings) -> None:
    await stop.wait()
    replica.drain()
    if replica.in_step_s < settings.step_s:  # an engine that hangs finishes nothing
        await asyncio.sleep(settings.drain_s)
    replica.cut_off()


def _poster(control: Way) -> Post:
    async def post(payloads: Sequence[bytes]) -> None:
        peer = ServiceClient.by(control, "the control plane", limit=1)
        try:
            await peer.call("POST", _USAGE, type(None), body=batch_of(payloads), timeout_s=_SHIP_S)
        finally:
            await peer.close()

    return post
