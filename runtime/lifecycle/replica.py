"""Own the state of a replica process: parked (STANDBY), restoring, ready, asleep, draining, failed.

A replica sleeps with its weights in host memory (ASLEEP) or without them (DEEP_SLEEP).

`version_restore.py` does a restore, `inference_api.py` responds to requests.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kelvin.contracts.accounting.meter_format import Phase
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.artifacts.push_api import KeepSeal
from kelvin.contracts.artifacts.runtime_control import (
    BindRequest,
    BindResponse,
    GateFacts,
    GateJob,
    RuntimeReport,
    RuntimeState,
    SealAttestation,
    SealJob,
)
from kelvin.contracts.errors import Conflict, Failure, Internal, Refused, Unavailable
from kelvin.contracts.timeline import StageSpan
from runtime.drivers.event_stream import EventStreams
from runtime.drivers.interface import Event
from runtime.drivers.thread_bridge import ThreadBridge, run_in_thread
from runtime.lifecycle.credit_policy import Credits
from runtime.lifecycle.meter_writer import MeterWriter
from runtime.surface.served_version import EngineCallbacks, ServedVersion, SuspendHandle

log = logging.getLogger(__name__)

T = TypeVar("T")

_WATCH_INTERVAL_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 5.0

# The states that may follow each state. FAILED is final; the process ends.
TRANSITIONS: Final[Mapping[RuntimeState, frozenset[RuntimeState]]] = {
    RuntimeState.STANDBY: frozenset({RuntimeState.RESTORING, RuntimeState.DRAINING, RuntimeState.FAILED}),
    RuntimeState.RESTORING: frozenset({RuntimeState.READY, RuntimeState.DRAINING, RuntimeState.FAILED}),
    RuntimeState.READY: frozenset({RuntimeState.ASLEEP, RuntimeState.DRAINING, RuntimeState.FAILED}),
    RuntimeState.ASLEEP: frozenset(
        {RuntimeState.DEEP_SLEEP, RuntimeState.RESTORING, RuntimeState.DRAINING, RuntimeState.FAILED}
    ),
    RuntimeState.DEEP_SLEEP: frozenset({RuntimeState.RESTORING, RuntimeState.DRAINING, RuntimeState.FAILED}),
    RuntimeState.DRAINING: frozenset({RuntimeState.FAILED}),
    RuntimeState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ReplicaOperations:
    """The blocking operations of a replica. Each runs in its own thread and may raise `Refused`."""

    restore: Callable[[BindRequest, EngineCallbacks], ServedVersion]
    gate: Callable[[GateJob], GateFacts]
    seal: Callable[[SealJob], SealAttestation]
    warm_up: Sequence[Callable[[], None]] = ()  # short steps


class RuntimeReplica:
    """The state of one process. A standby binds one version, once: its process never serves another tenant."""

    def __init__(
        self,
        runtime_id: str,
        meter: MeterWriter,
        operations: ReplicaOperations,
        url: str = "",
        *,
        step_s: float = math.inf,
    ) -> None:
        """`url` is the address for other hosts, "" for none. An engine without progress for `step_s` seconds hangs."""
        self.runtime_id = runtime_id
        self._url = url
        self._step_s = step_s
        self.meter = meter
        self._operations = operations
        self._state = RuntimeState.STANDBY
        self._operation_lock = asyncio.Lock()  # gate and bind both change torch's global defaults while they run
        self._pending_operations = 0  # orders to a standby that run or wait for the lock
        self._bind: BindRequest | None = None
        self._served_version: ServedVersion | None = None
        self._streams: EventStreams | None = None
        self.credits = Credits(1)  # replaced when a version is ready
        self._thread_bridge: ThreadBridge | None = None
        self._suspend_handle: SuspendHandle | None = None  # while it sleeps
        self._stages: list[StageSpan] = []  # of the current restore, or of the last one
        self.failure: Failure | None = None
        self.may_exit = asyncio.Event()  # set when nothing is in flight and no request will be accepted

    def __repr__(self) -> str:
        return f"<RuntimeReplica {self.runtime_id} {self._state.value} {self._served_version!r} {self._streams!r}>"

    @property
    def state(self) -> RuntimeState:
        """Return the process's current state."""
        return self._state

    async def warm_up(self, delay_s: float) -> None:
        """Do parts of a restore in advance, while the standby is parked. A bind waits for at most one step."""
        await asyncio.sleep(delay_s)
        for step in self._operations.warm_up:
            async with self._operation_lock:
                if self._state is not RuntimeState.STANDBY:
                    return
                try:
                    await run_in_thread("warm-up", step)
                except Exception:
                    log.exception("warm-up")
                    return

    @asynccontextmanager
    async def _hold_standby(self) -> AsyncIterator[None]:
        """Hold the operation lock for an order to a standby. Reports show the order while it waits or runs."""
        self._pending_operations += 1
        try:
            async with self._operation_lock:
                yield
        finally:
            self._pending_operations -= 1

    async def gate(self, job: GateJob) -> GateFacts:
        """Examine an architecture. It stays a standby, with limited memory; the caller ends it. Raises `Refused`."""
        async with self._hold_standby():
            self._require_state(RuntimeState.STANDBY, "to examine a model")
            return await run_in_thread("gate", lambda: self._operations.gate(job))

    async def seal(self, job: SealJob) -> SealAttestation:
        """Seal a draft. The process ends afterwards, because it has held a tenant's bytes.

        Raises `Refused`: Conflict if it is no standby, which changes nothing; otherwise what is wrong with the draft.
        """
        async with self._hold_standby():
            self._require_state(RuntimeState.STANDBY, "to seal a draft")
            self._transition(RuntimeState.RESTORING)
            try:
                return await self._race_exit(run_in_thread("seal", lambda: self._operations.seal(job)))
            finally:
                self.drain()

    async def bind(self, request: BindRequest) -> BindResponse:
        """Restore a version and become ready to serve it. Raises `Refused`: Conflict if it is no standby, which changes
        nothing. After any other failure the process ends.
        """
        async with self._hold_standby():
            self._require_state(RuntimeState.STANDBY, "to take a version")
            self._transition(RuntimeState.RESTORING)
            self._bind = request
            try:
                self.meter.identify(
                    tenant=request.tenant,
                    model=request.model,
                    version=request.version,
                    device_class=request.device_class,
                )
            except Exception:
                self.fail(Internal())
                raise
            served = await self._become_ready("restore", lambda callbacks: self._operations.restore(request, callbacks))
        return self._build_bind_response(served, dict(served.bytes_by_tier))

    async def sleep(self) -> None:
        """Release everything except the version's weights in host memory.

        Raises `Refused`: Conflict if it is not ready, busy, unproven, or of a kind that can't sleep, which changes
        nothing. After any other failure the process ends.
        """
        async with self._operation_lock:
            self._require_state(RuntimeState.READY, "to sleep")
            served = self._served_version
            assert served is not None
            is_busy = self._streams or self.credits.active_requests or served.engine.running or served.engine.waiting
            if is_busy or self._has_unverified_answers(served):
                raise Refused(Conflict("state", "is busy; must be idle and proven to sleep"))
            if served.suspend_handle is None:
                raise Refused(Conflict("state", "keeps nothing; must be of a kind that can sleep"))
            self._transition(RuntimeState.ASLEEP)
            suspend_handle = self._suspend_handle = served.suspend_handle
            if not await run_in_thread("stop", self._stop_engine):
                self.fail(Internal())
                raise Refused(Internal())
            if self._thread_bridge is not None:
                self._thread_bridge.close()
            self._served_version = self._streams = None
            del served
            try:
                await run_in_thread("suspend", suspend_handle.suspend)
            except Exception:  # it still holds device memory, so it must not count as asleep
                self.fail(Internal())
                raise
            if self._state is RuntimeState.ASLEEP:
                self.meter.start_phase(Phase.STANDBY)
        log.info("asleep")

    async def release_weights(self) -> None:
        """Also release a sleeping version's weights. Raises `Refused`: Conflict if the replica is not asleep. After any
        other failure the replica is FAILED.
        """
        async with self._operation_lock:
            self._require_state(RuntimeState.ASLEEP, "to drop its weights")
            suspend_handle = self._suspend_handle
            assert suspend_handle is not None
            try:
                await run_in_thread("release weights", suspend_handle.release_weights)
            except Refused as refused:
                self.fail(refused.failure)
                raise
            except Exception:
                self.fail(Internal())
                raise
            if self._state is RuntimeState.ASLEEP:
                self._transition(RuntimeState.DEEP_SLEEP)
        log.info("asleep without weights")

    async def wake(self, request: BindRequest) -> BindResponse:
        """Serve the sleeping version again. Raises `Refused`: Conflict for another version or if it isn't asleep, which
        changes nothing. After any other failure the process ends.
        """
        async with self._operation_lock:
            if had_weights := self._state is not RuntimeState.DEEP_SLEEP:
                self._require_state(RuntimeState.ASLEEP, "to wake")
            suspend_handle, bind = self._suspend_handle, self._bind
            assert suspend_handle is not None
            assert bind is not None
            if (request.tenant, request.model, request.version) != (bind.tenant, bind.model, bind.version):
                raise Refused(Conflict("version", f"is {request.version[:12]}; must be the one that sleeps here"))
            self._transition(RuntimeState.RESTORING)
            self.meter.start_phase(Phase.RESTORE)
            # Bills use the device class of the first bind.
            bind_request = msgspec.structs.replace(request, device_class=bind.device_class)
            served = await self._become_ready("wake", lambda callbacks: suspend_handle.resume(bind_request, callbacks))
            self._bind = bind_request
            self._suspend_handle = None
        return self._build_bind_response(served, {} if had_weights else dict(served.bytes_by_tier))

    async def _become_ready(self, name: str, start: Callable[[EngineCallbacks], ServedVersion]) -> ServedVersion:
        """Run `start` in a thread and serve what it returns. Re-raises its exception; the replica has then failed."""
        self._thread_bridge = ThreadBridge(asyncio.get_running_loop(), self._dispatch)
        self._stages = []
        callbacks = EngineCallbacks(self._thread_bridge.post, self._on_busy, self._stages.append)
        try:
            served = await self._race_exit(run_in_thread(name, lambda: start(callbacks)))
        except Refused as refused:
            if self._state is RuntimeState.RESTORING:
                self.fail(refused.failure)
            raise
        except Exception:
            self.fail(Internal())
            raise
        self._served_version = served
        self._streams = EventStreams(served.thread.submit, served.thread.cancel)
        self.credits = Credits(served.limits.max_streams)
        self.meter.start_phase(Phase.IDLE)
        self._transition(RuntimeState.READY)
        return served

    def _build_bind_response(self, served: ServedVersion, bytes_by_tier: dict[str, int]) -> BindResponse:
        restore_us = max((span.after_us for span in served.spans), default=0)
        log.info("ready", extra={"version": served.bind.version, "restore_ms": restore_us / 1000})
        return BindResponse(
            runtime_id=self.runtime_id,
            max_streams=served.limits.max_streams,
            spans=served.spans,
            bytes_by_tier=bytes_by_tier,
            url=self._url,
        )

    def require_ready(self) -> tuple[ServedVersion, EventStreams]:
        """Return the version and the streams for a new request. Raises `Refused` if this replica accepts none."""
        if self.failure is not None:
            raise Refused(self.failure)
        if self._served_version is None or self._streams is None or self._state is not RuntimeState.READY:
            raise Refused(Unavailable("this replica"))
        return self._served_version, self._streams

    @property
    def stalled_s(self) -> float:
        """Return for how many seconds the engine's current step has made no progress; 0 if no step runs."""
        return 0.0 if self._served_version is None else self._served_version.thread.stalled_s

    @property
    def may_record_answers(self) -> bool:
        """Return whether this replica may still record known answers or reproduce them."""
        if self._state in (RuntimeState.STANDBY, RuntimeState.RESTORING):
            return True
        served = self._served_version
        return (
            self.failure is None
            and served is not None
            and served.recorded_seal is not None
            and self._has_unverified_answers(served)
        )

    @property
    def verified_seal(self) -> KeepSeal | None:
        """Return the known answers that were recorded here and have been reproduced since, or None."""
        served = self._served_version
        if (
            self.failure is not None
            or served is None
            or served.recorded_seal is None
            or self._has_unverified_answers(served)
        ):
            return None
        return KeepSeal(tenant=served.bind.tenant, seal=served.recorded_seal)

    def _has_unverified_answers(self, served: ServedVersion) -> bool:
        return served.engine.needs_probe or served.thread.poisoned is not None

    def drain(self) -> None:
        """Accept no new requests. `may_exit` is set once nothing is in flight. Idempotent."""
        if self._state not in (RuntimeState.DRAINING, RuntimeState.FAILED):
            self._transition(RuntimeState.DRAINING)
            log.info("draining", extra={"in_flight": len(self._streams or ())})
        self._exit_if_idle()

    def stop_damaged(self) -> None:
        """Stop serving, because the version's bytes in host memory are damaged. Requests on a CPU compute over those
        bytes and fail now with `weights_damaged`. Requests on a device compute over copies that were verified when they
        were made, so they finish, as in a drain. Raises `Refused(Conflict)` without a version.
        """
        if self._bind is None:
            raise Refused(Conflict("state", f"is {self._state.value}; must have a version to have it damaged"))
        if (
            self._served_version is not None
            and self._served_version.suspend_handle is not None
            and self._served_version.suspend_handle.has_device_copies
        ):
            self.drain()
        else:
            self.fail(WeightsDamaged(self._bind.version))

    def abort_in_flight(self) -> None:
        """Cancel what is still in flight after the drain time."""
        if self._streams is not None:
            self._streams.abandon_all(Unavailable("this replica"))
        self.may_exit.set()

    def fail(self, failure: Failure) -> None:
        """Fail closed: serve nothing from now on, and let the process end. Only the first failure counts."""
        if self._state is RuntimeState.FAILED:
            return
        self.failure = failure
        self._transition(RuntimeState.FAILED)
        log.error("failed", extra={"code": failure.code, "why": failure.message})
        if self._streams is not None:
            self._streams.release_all(failure)
        self.may_exit.set()

    async def watch(self) -> None:
        """Detect a hanging engine, a dead engine thread and a poisoned engine without requests. Renew the meter
        page.
        """
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self.meter.checkpoint()
            self._check_engine()

    async def close(self) -> None:
        """Stop the engine's thread. A thread that hangs in a step is abandoned."""
        if self._thread_bridge is not None:
            self._thread_bridge.close()
        if not await run_in_thread("stop", self._stop_engine):
            log.error("the engine is still in a step")

    def _stop_engine(self) -> bool:
        return self._served_version is None or self._served_version.thread.stop(_STOP_TIMEOUT_S)

    def report(self) -> RuntimeReport:
        """Return the state for the control plane and operators."""
        bind, served = self._bind, self._served_version
        engine = None if served is None else served.engine
        return RuntimeReport(
            runtime_id=self.runtime_id,
            pid=os.getpid(),
            # A control plane that takes over must not count a standby as free if its predecessor gave it an order.
            state=RuntimeState.RESTORING
            if self._pending_operations and self._state is RuntimeState.STANDBY
            else self._state,
            tenant=None if bind is None else bind.tenant,
            model=None if bind is None else bind.model,
            version=None if bind is None else bind.version,
            device_class=None if bind is None else bind.device_class,
            threads=1 if bind is None else bind.threads,
            max_streams=0 if served is None else served.limits.max_streams,
            running=0 if engine is None else engine.running,
            waiting=0 if engine is None else engine.waiting,
            kv_blocks_free=0 if engine is None else engine.kv_blocks_free,
            kv_blocks_total=0 if engine is None else engine.kv_blocks_total,
            leases=0
            if self._state is RuntimeState.DEEP_SLEEP or (served is None and self._suspend_handle is None)
            else 1,
            open_files=len(list(Path("/proc/self/fd").iterdir())) - 1,  # minus the descriptor that the listing uses
            spans=tuple(self._stages) if served is None else served.spans,
            url=self._url,
        )

    async def _race_exit(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises `Refused(Unavailable)` once the process is to end."""
        task, may_exit = asyncio.ensure_future(work), asyncio.ensure_future(self.may_exit.wait())
        try:
            await asyncio.wait({task, may_exit}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refused(Unavailable("this replica"))
            return task.result()
        finally:
            may_exit.cancel()
            task.cancel()

    def _require_state(self, state: RuntimeState, purpose: str) -> None:
        if self._state is not state:
            raise Refused(Conflict("state", f"is {self._state.value}; must be {state.value} {purpose}"))

    def _transition(self, new_state: RuntimeState) -> None:
        if new_state not in TRANSITIONS[self._state]:
            raise Refused(Conflict("state", f"{self._state.value} does not become {new_state.value}"))
        self._state = new_state

    def _dispatch(self, events: list[Event]) -> None:
        """Deliver the events of one engine step. Runs on the event loop."""
        if self._streams is not None:
            self._streams.dispatch(events)
        self._check_engine()
        if self._state is RuntimeState.DRAINING:
            self._exit_if_idle()

    def _check_engine(self) -> None:
        if self._served_version is not None and (failure := self._served_version.thread.poisoned) is not None:
            self.fail(failure)
        elif self.stalled_s >= self._step_s:
            log.error("the engine hangs", extra={"without_progress_s": round(self.stalled_s, 1)})
            self.fail(Unavailable("this replica"))

    def _exit_if_idle(self) -> None:
        if not self._streams:
            self.may_exit.set()

    def _on_busy(self, busy: bool) -> None:
        """Switch the meter's phase. Runs in the engine's thread."""
        self.meter.start_phase(Phase.ACTIVE if busy else Phase.IDLE)
