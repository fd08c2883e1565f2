"""The composition root of a standby and of the runtime that it may become: it builds and connects all parts."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import FastAPI
from starlette.types import ASGIApp

from kelvin.contracts.artifacts.filter_api import FILTERS_SOCKET
from kelvin.contracts.artifacts.push_api import KeepSeal
from kelvin.contracts.artifacts.runtime_control import BindRequest, Pod
from kelvin.contracts.errors import Refused
from kelvin.contracts.roles import Role, Rules
from kelvin.contracts.serving.control_messages import batch_of
from kelvin.ipc.connector import Connector
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import Loops
from runtime.api.control_api import BindHandler, attach_replica, build_bind_api
from runtime.api.inference_api import ServingApi
from runtime.api.orphan_records import OrphanRecords, open_orphan_records
from runtime.app.replica_operations import build_operations
from runtime.app.roles_policy import BIND_API_RULES, RULES
from runtime.app.settings import LISTEN, STANDBY_LISTEN, RuntimeSettings
from runtime.dependencies import LEDGER, SEALS
from runtime.lifecycle.gpu_watch import GpuWatch
from runtime.lifecycle.meter_writer import MeterWriter
from runtime.lifecycle.replica import RuntimeReplica
from runtime.surface.filter_pipeline import FilterClient

log = logging.getLogger(__name__)

_WARM_UP_DELAY_S: Final = 0.25  # a standby that was forked for a waiting request has its bind by then
_LAST_FRAMES_S: Final = 5  # for activators to read responses that are already complete
_LAST_RECEIPTS_S: Final = 1.0  # for activators to confirm their records; less than the lifeline's grace period
_SEAL_POLL_S: Final = 0.5
_SEAL_PAUSES_S: Final = (1.0, 5.0, 25.0)  # between attempts
UploadSeal = Callable[[KeepSeal], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ReplicaProcess:
    """A replica's process, and the resources that it opens before its event loop runs."""

    runtime_id: str
    directory: SocketDirectory
    listener: socket.socket
    meter: MeterWriter
    control: FastAPI
    pod: Pod | None = None  # binds its version at once, or parks until it gets a bind order
    gpus: GpuWatch | None = None  # an unhealthy GPU starts a drain
    agent: SocketDirectory | None = None  # of the cache agent's sockets, if it isn't `directory`


async def serve(process: ReplicaProcess, settings: RuntimeSettings, stop: asyncio.Event) -> None:
    """Run one replica until `stop` or a drain is over. Raises `Refused` if the replica has failed."""
    directory, pod, control, gpus = process.directory, process.pod, process.control, process.gpus
    peers = settings.peer_settings
    initial_bind, parked = (None, None) if pod is None else (pod.bind, pod.parked)
    async with (
        open_internal_server(directory, peers, Role.RUNTIME, LISTEN if parked is None else STANDBY_LISTEN) as inner,
        open_filter_client(directory, settings.filters) as filters,
        open_orphan_records(
            settings.spools,
            process.runtime_id,
            partial(_post_usage, inner.connector_factory.connector_to(peers.control, Role.CONTROLPLANE)),
        ) as orphans,
    ):
        url = inner.url if parked is None else ""  # other processes know a parked pod's address already
        operations = build_operations(process.agent or directory, settings.restore_s, filters)
        replica = RuntimeReplica(process.runtime_id, process.meter, operations, url, step_s=settings.step_s)
        snapshotter = inner.connector_factory.connector_to(peers.snapshotter, Role.SNAPSHOTTER)
        attach_replica(control, replica)
        api = ServingApi(replica, orphans, control, in_pod=pod is not None)
        remote_app: ASGIApp = api
        remote_rules: Rules = RULES
        if parked is not None:
            remote_app = build_bind_api(BindHandler(parked, replica, stop, settings.restore_s), replica)
            remote_rules = BIND_API_RULES
        try:
            async with Loops() as loops, asyncio.TaskGroup() as tasks:
                loops.start("engine watch", replica.watch)
                upload_loop = partial(upload_recorded_seal, replica, partial(_post_seal, snapshotter))
                # Optional: other replicas record the answers again.
                loops.start("known answers", upload_loop, takes_readiness=False)
                if gpus is not None:
                    loops.start("GPU watch", partial(gpus.run, replica.drain))
                background_tasks = (
                    tasks.create_task(replica.warm_up(_WARM_UP_DELAY_S), name="warm up"),
                    tasks.create_task(_drain_on_stop(stop, replica, settings), name="drain"),
                )
                ended = asyncio.Event()
                tasks.create_task(_wait_for_exit(replica, orphans, ended), name="wait for exit")
                if initial_bind is not None:
                    tasks.create_task(_bind_initial(replica, initial_bind), name="bind")
                await inner.serve(api, process.listener, remote_rules, ended, _LAST_FRAMES_S, remote_app=remote_app)
                await loops.close()
                for task in background_tasks:
                    task.cancel()
        finally:
            await replica.close()
    if replica.failure is not None:
        raise Refused(replica.failure)


@asynccontextmanager
async def open_filter_client(directory: SocketDirectory, on: bool) -> AsyncIterator[FilterClient | None]:
    """Yield a client of the filter process, or None if the installation runs none."""
    if not on:
        yield None
        return
    client = ServiceClient(directory, FILTERS_SOCKET, "the filters")
    try:
        yield FilterClient(client, asyncio.get_running_loop())
    finally:
        await client.close()


async def upload_recorded_seal(replica: RuntimeReplica, upload: UploadSeal) -> None:
    """Send the known answers that this replica recorded to the snapshotter, once the engine has reproduced them.

    The snapshotter signs them as a seal of the version. Nothing waits for this: if it fails, the next start records the
    answers again. Returns when nothing was recorded, when the seal is stored, and after the last attempt.
    """
    while True:
        await asyncio.sleep(_SEAL_POLL_S)
        if not replica.may_record_answers:
            break
    seal = replica.verified_seal
    if seal is None:
        return
    log_fields = {"tenant": seal.tenant, "version": seal.seal.version}
    for pause_s in (*_SEAL_PAUSES_S, None):
        try:
            await upload(seal)
        except Refused as refused:
            log.warning("known answers were not kept", extra={**log_fields, "why": refused.failure.message})
            if pause_s is None or not refused.failure.retryable:
                return
            await asyncio.sleep(pause_s)
        else:
            log.info("known answers of this engine are kept", extra=log_fields)
            return


async def _bind_initial(replica: RuntimeReplica, initial_bind: BindRequest) -> None:
    """Bind the pod's version. The replica records a failure and ends with it."""
    try:
        await replica.bind(initial_bind)
    except Refused:
        return
    except Exception:
        log.exception("bind")


async def _wait_for_exit(replica: RuntimeReplica, orphans: OrphanRecords, ended: asyncio.Event) -> None:
    """Set `ended` once nothing is in flight and activators had time to confirm their last records."""
    await replica.may_exit.wait()
    await orphans.wait_until_empty(_LAST_RECEIPTS_S)
    ended.set()


async def _drain_on_stop(stop: asyncio.Event, replica: RuntimeReplica, settings: RuntimeSettings) -> None:
    await stop.wait()
    replica.drain()
    if replica.stalled_s < settings.step_s:  # an engine that hangs finishes no request, so don't wait for it
        await asyncio.sleep(settings.drain_s)
    replica.abort_in_flight()


async def _post_usage(control: Connector, payloads: Sequence[bytes]) -> None:
    await _post(control, "the control plane", "/internal/v1/usage/requests", batch_of(payloads), LEDGER.timeout_s)


async def _post_seal(snapshotter: Connector, seal: KeepSeal) -> None:
    await _post(snapshotter, "the snapshotter", "/internal/v1/seals", seal, SEALS.timeout_s)


async def _post(connector: Connector, service: str, path: str, body: object, timeout_s: float) -> None:
    client = ServiceClient.from_connector(connector, service, limit=1)
    try:
        await client.call("POST", path, type(None), body=body, timeout_s=timeout_s)
    finally:
        await client.close()
