"""Wake versions while there is no control plane: a stand-in for the autoscaler.

If no wake call was accepted for WAKE_PATIENCE_S and the feed is silent, this activator starts the version. It takes the
autoscaler's lock and tells a parked standby to take the version, as the control plane would. If a replica of the
version sleeps, that one is woken instead. A standby takes one version, once. The next control plane adopts it. Only
requests whose API key is in the last feed cause a start. No replica is removed to make room, and no standby is created.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from activator import dependencies
from activator.queue.waker import WakeCall
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.fallback_scaler_policy import (
    AlreadyServing,
    NoStart,
    StartRuntime,
    choose_runtime,
    holds_slot,
)
from kelvin.contracts.accounting.meter_format import decode_meter
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse, RuntimeReport
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow, RestoreFailure
from kelvin.contracts.serving.machine import Machine, available_bytes, kv_bytes_for, threads_for
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.standby_lock import StandbyLock, try_acquire_standby_lock
from kelvin.process.procfs import start_time_ns
from kelvin.telemetry.policy.instruments import MetricsPage

log = logging.getLogger(__name__)

WAKE_PATIENCE_S: Final = 2.0  # a control plane that died is usually back sooner
REPORT_TIMEOUT_S: Final = dependencies.ACCOUNTS.timeout_s  # for a runtime's report
CLAIM_TIMEOUT_S: Final = 5.0  # for a standby to take a version, not to restore it
RESTORE_TIMEOUT_S: Final = dependencies.WAKING.timeout_s
POLL_S: Final = 0.02
MEMINFO: Final = Path("/proc/meminfo")
_RUNTIME_UNUSABLE: Final = frozenset({"unavailable", "conflict"})  # the process is dead or was taken: try another one


class FallbackScaler:
    """A wake call that starts the version itself if the autoscaler is away. Use from one event loop; `close` ends it.

    `machine` returns the last feed's data of this machine, or None without a valid feed. `publish_line` receives the
    results as feed messages.
    """

    def __init__(
        self,
        send_wake: WakeCall,
        directory: SocketDirectory,
        *,
        is_feed_connected: Callable[[], bool],
        machine: Callable[[], Machine | None],
        publish_line: Callable[[Feed], None],
        wake_sent_us: Callable[[VersionKey], int | None],
        page: MetricsPage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send_wake = send_wake
        self._directory = directory
        self._is_feed_connected = is_feed_connected
        self._machine = machine
        self._publish_line = publish_line
        self._wake_sent_us = wake_sent_us
        self._clock = clock
        self._unaccepted_since_s: float | None = None  # since when no wake call is accepted
        self._starts: dict[VersionKey, asyncio.Task[None]] = {}
        self._counter = page.counter(
            "kelvin_own_starts_total", "Starts that the activator decided without a control plane.", ("result",)
        )

    def __repr__(self) -> str:
        return f"<FallbackScaler starting={len(self._starts)} away={self._unaccepted_since_s is not None}>"

    async def send_wake(self, key: VersionKey) -> bool:
        """Return whether the autoscaler or this activator takes care of the version."""
        if await self._send_wake(key):
            self._unaccepted_since_s = None
            return True
        now = self._clock()
        if self._is_feed_connected():
            self._unaccepted_since_s = None
        elif self._unaccepted_since_s is None:
            self._unaccepted_since_s = now
        if self._unaccepted_since_s is None or now - self._unaccepted_since_s < WAKE_PATIENCE_S:
            return False
        if key in self._starts:
            return True
        machine = self._machine()
        lock = None if machine is None else try_acquire_standby_lock(self._directory)
        if machine is None or lock is None:
            return False
        self._starts[key] = asyncio.create_task(self._start(key, machine, lock), name=f"own start {key}")
        return True

    async def close(self) -> None:
        """Cancel the starts. A runtime that was told to take a version continues."""
        starts = tuple(self._starts.values())
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, key: VersionKey, machine: Machine, lock: StandbyLock) -> None:
        try:
            with closing(lock):
                started = await self._decide(key, machine)
            if started is not None:
                await self._await_bind(key, *started)
        except Exception:
            log.exception("a start by this activator failed unexpectedly", extra={"version": str(key)})
        finally:
            del self._starts[key]

    async def _decide(
        self, key: VersionKey, machine: Machine
    ) -> tuple[RuntimeReport, asyncio.Task[BindResponse]] | None:
        reports = await _fetch_reports(self._directory)
        held = await asyncio.to_thread(_held_slots, self._directory.path / "meters")
        match choose_runtime(key, reports, held, machine.slots):
            case AlreadyServing(report):
                self._publish_replica(key, report.runtime_id, report.max_streams, report.spans)
            case NoStart(why):
                log.warning("this activator can't start the version", extra={"version": str(key), "why": why})
                self._counter.add(("none",))
            case StartRuntime(report, wakes):
                threads = threads_for(machine.cores, held + 1, machine.threads_cap)
                bind = BindRequest(
                    tenant=key.tenant, model=key.model, version=key.version, device_class=f"cpu-{threads}",
                    threads=threads, kv_bytes=kv_bytes_for(machine.kv_bytes, available_bytes(MEMINFO.read_text())),
                )  # fmt: skip
                log_fields = {"version": str(key), "runtime_id": report.runtime_id, "wakes": wakes}
                log.warning("no control plane answers; starting the version on a runtime", extra=log_fields)
                path = "/control/wake" if wakes else "/control/bind"
                bind_task = asyncio.create_task(
                    self._bind(report.runtime_id, path, bind), name=f"bind {report.runtime_id}"
                )
                try:
                    await self._wait_until_claimed(report, bind_task)
                except BaseException:
                    bind_task.cancel()
                    raise
                return report, bind_task
        return None

    async def _wait_until_claimed(self, before: RuntimeReport, bind_task: asyncio.Task[BindResponse]) -> None:
        """Wait until the runtime can't be given to another version. Then the lock may be released."""
        give_up_at_s = self._clock() + CLAIM_TIMEOUT_S
        while not bind_task.done() and self._clock() < give_up_at_s:
            await asyncio.wait((bind_task,), timeout=POLL_S)
            report = await _fetch_report(self._directory, f"rt-{before.runtime_id}.sock")
            if report is None or report.state is not before.state:
                return

    async def _bind(self, runtime_id: str, path: str, bind: BindRequest) -> BindResponse:
        client = ServiceClient(self._directory, f"rt-{runtime_id}.sock", "the runtime")
        try:
            return await client.call("POST", path, BindResponse, body=bind, timeout_s=RESTORE_TIMEOUT_S)
        finally:
            await client.close()

    async def _await_bind(self, key: VersionKey, report: RuntimeReport, bind_task: asyncio.Task[BindResponse]) -> None:
        began_us = int(self._clock() * 1e6)
        try:
            response = await bind_task
        except Refused as refused:
            self._counter.add(("failed",))
            log_fields = {"version": str(key), "runtime_id": report.runtime_id, "why": refused.failure.message}
            log.warning("a start by this activator failed", extra=log_fields)
            if refused.failure.code not in _RUNTIME_UNUSABLE:
                self._publish_failure(key, refused.failure)
        else:
            self._counter.add(("ready",))
            zero_us = self._wake_sent_us(key) or began_us
            waited_us = max(0, began_us - zero_us)
            decision_spans = (StageSpan(Stage.DECIDED, waited_us), StageSpan(Stage.PROMOTED, waited_us))
            shifted = tuple(StageSpan(span.stage, span.after_us + waited_us) for span in response.spans)
            self._publish_replica(key, report.runtime_id, response.max_streams, (*decision_spans, *shifted))
        finally:
            bind_task.cancel()

    def _publish_replica(
        self, key: VersionKey, runtime_id: str, max_streams: int, spans: tuple[StageSpan, ...]
    ) -> None:
        row = ReplicaRow(
            runtime_id=runtime_id, tenant=key.tenant, model=key.model, version=key.version,
            address=f"rt-{runtime_id}.sock", max_streams=max_streams, draining=False, restore=spans,
        )  # fmt: skip
        if not self._is_feed_connected():  # otherwise the control plane has adopted it and reports it
            self._publish_line(Feed(revision=0, replicas=(row,)))

    def _publish_failure(self, key: VersionKey, failure: Failure) -> None:
        if not self._is_feed_connected():
            self._publish_line(
                Feed(revision=0, failures=(RestoreFailure.from_failure(key.tenant, key.version, failure),))
            )


async def _fetch_reports(directory: SocketDirectory) -> list[RuntimeReport]:
    """Return the reports of all runtimes of this machine that answer."""
    names = sorted(path.name for path in directory.path.glob("rt-*.sock"))
    found = await asyncio.gather(*(_fetch_report(directory, name) for name in names))
    return [each for each in found if each is not None and f"rt-{each.runtime_id}.sock" in names]


async def _fetch_report(directory: SocketDirectory, name: str) -> RuntimeReport | None:
    client = ServiceClient(directory, name, "the runtime", limit=1)
    try:
        return await client.call("GET", "/control/state", RuntimeReport, timeout_s=REPORT_TIMEOUT_S)
    except Refused:
        return None
    finally:
        await client.close()


def _held_slots(meters: Path) -> int:
    """Return the device slots that living processes hold, by their meter pages. Blocks: run it in a thread. Includes
    processes that no longer listen.
    """
    held = 0
    for page in meters.iterdir():
        # Foreign entries and dead processes raise. A page that is older than its process is of an earlier process.
        with suppress(OSError, ValueError):
            born, meter = start_time_ns(int(page.name.partition(".")[0])), decode_meter(page.read_bytes())
            held += holds_slot(meter) and not meter.is_older_than(born)
    return held
