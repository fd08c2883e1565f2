"""The actuator of one machine: makes as many replicas of a version as are wanted, from parked standbys.

`apply` is on the path of a cold start. It decides and changes the table at once, does the rest in the background, and
touches no disk before a standby was told to bind the version. `autoscaler.py` decides how many replicas there should
be, `drain.py` ends one, and `adopter.py` adopts those of an earlier control plane.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from controlplane import dependencies
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.drain import drain_and_end, end_damaged_replica
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.replica_sleeper import ReplicaSleeper
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.replacement_steps import ReplacementStep
from controlplane.scaling.policy.replica_lifecycle import SLEEPING, ReplicaEvent, ReplicaState
from controlplane.scaling.policy.scale_down import VersionReplica, choose_replicas_to_keep, plan_scale_down
from controlplane.scaling.policy.standby_sizing import READY_HOLDS_CORES_S
from controlplane.scaling.policy.start_problem import crash_loop
from controlplane.scaling.replicas import NoSlot, Replica, ReplicaListener, Start, replica_row
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse
from kelvin.contracts.errors import Failure, Internal, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed, RestoreFailure
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.ipc.forked_process import KILL_S
from kelvin.process.loops import notify

log = logging.getLogger(__name__)

STANDBY_WAIT_S: Final = 20.0  # for a standby, if none is parked
RESTORE_S: Final = dependencies.RESTORE.timeout_s
MAX_ATTEMPTS: Final = 3  # in a row, if the process is lost during the restore
EXIT_WAIT_S: Final = 5.0  # until a lost process frees its slot

EndReplica = Callable[[Fleet, FeedHub, RuntimeProcess, int, float, float], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _PendingStart:
    """A start or wake that is running: when it was requested, and when it was decided."""

    key: VersionKey
    requested_us: int
    decided_us: int
    is_wake: bool = False


class StartListener(Protocol):
    """Callback on an accepted start. Called on the event loop, on the path of a cold start; must not block."""

    def __call__(self, key: VersionKey, requested_us: int, /, *, parked: bool, wake_level: Level | None) -> None: ...


class LocalActuator:
    """Makes and ends replicas on this machine. Not thread-safe: use from one event loop."""

    def __init__(
        self, fleet: Fleet, pool: StandbyPool, feed: FeedHub, cpu_share: CpuShare, drain_s: float, term_s: float
    ) -> None:
        """Give a draining replica `drain_s` seconds to finish its requests. Kill it `term_s` seconds after that."""
        self._fleet = fleet
        self._table = fleet.table
        self._pool = pool
        self._feed = feed
        self._cpu_share = cpu_share
        self._drain_s = drain_s
        self._term_s = term_s
        self._sleeper = ReplicaSleeper(fleet, feed, cpu_share)
        self._waking: dict[str, _PendingStart] = {}  # by runtime id; asleep or still falling asleep
        self._failed_attempts: dict[VersionKey, int] = {}  # in a row, by version
        self._listeners: list[ReplicaListener] = []
        self._start_listeners: list[StartListener] = []
        self.on_start_waiting: Callable[[VersionKey], None] = lambda _: None  # called when a start waits for a standby
        fleet.add_exit_listener(self._handle_exit)

    def __repr__(self) -> str:
        return f"<LocalActuator {self._table!r}>"

    def add_listener(self, listener: ReplicaListener) -> None:
        """Call `listener` on replica state changes from now on."""
        self._listeners.append(listener)

    def add_start_listener(self, listener: StartListener) -> None:
        """Call `listener` on each start that is accepted from now on."""
        self._start_listeners.append(listener)

    def add_slot_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on each device slot that a replica gives back without dying."""
        self._sleeper.add_slot_listener(listener)

    @property
    def drain_max_s(self) -> float:
        """Return the seconds from the order to drain a replica until it is dead, at the very most."""
        return self._drain_s + self._term_s + KILL_S + 10.0

    @property
    def slots(self) -> int:
        """Return the number of device slots of this machine."""
        return self._table.slots

    def ready_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests."""
        return self._table.ready_count(key)

    def live_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests or will."""
        return self._table.live_count(key)

    def started_count(self, key: VersionKey) -> int:
        """Return how many of `live_count` have a process already."""
        return self._table.live_count(key) - len(self._table.starts_of(key))

    def process_count(self, key: VersionKey) -> int:
        """Return how many processes in any state and starts the version has."""
        return len(self._table.replicas_of(key)) + len(self._table.starts_of(key))

    def active_versions(self) -> tuple[VersionKey, ...]:
        """Return the versions that have a process or a start."""
        return self._table.active_versions()

    def leaving_count(self) -> int:
        """Return how many slots will come free: their replicas drain, end or are being replaced."""
        return self._table.leaving_count()

    def has_room(self) -> bool:
        """Return whether a device slot is free."""
        return self._table.held_slots < self._table.slots

    def apply(self, key: VersionKey, replicas: int, requested_us: int) -> None:
        """Scale the version to `replicas`. Idempotent. On return the order is accepted; replicas are ready later.

        `requested_us` is when the waiting request came. The restore's spans count from there.
        """
        for _ in range(replicas - self._table.live_count(key)):
            if not self._begin(key, requested_us):
                # No start was tried, so none failed: only the waiting requests fail.
                self._fail_waiting_requests(key, Overloaded("this machine", self._table.slots, 1.0, "device slots"))
                break
        self._release_surplus(key, replicas)
        if replicas == 0:
            self._failed_attempts.pop(key, None)

    def carry_out(self, runtime_id: str, step: ReplacementStep) -> None:
        """Carry out a step that begins or ends a replica: see `policy/replacement_steps.py`.

        BESIDE and AFTER need a replica that is ready. The version has as many replicas as before throughout. BESIDE
        raises NoSlot if no slot is free; then nothing has changed.
        """
        process, key = self._fleet[runtime_id], self._table[runtime_id].key
        match step:
            case ReplacementStep.BESIDE | ReplacementStep.AFTER:
                assert key is not None
                assert self._table[runtime_id].state is ReplicaState.READY
                log.info("a replica is replaced", extra={"runtime_id": runtime_id, "version": str(key), "how": step})
                if step is ReplacementStep.BESIDE:
                    start = self._table.add_start(key, self._now())
                    self._table.apply_event(runtime_id, ReplicaEvent.RELIEVE, self._now())
                    self._take_standby(start)
                else:
                    self.drain(process)
                    start = self._table.add_start(key, self._now(), predecessor=runtime_id)
                    self._fleet.tasks.start(self._start_in_freed_slot(process, start), f"follow {runtime_id}")
            case ReplacementStep.CONDEMN:
                self._begin_drain(process, end_damaged_replica)
            case ReplacementStep.END:
                self._fleet.end(process)

    async def _start_in_freed_slot(self, process: RuntimeProcess, start: Start) -> None:
        """Wait until `process` is dead, then give its slot to `start`."""
        is_gone = await process.wait_gone(self.drain_max_s)
        if not self._table.is_pending(start):
            return
        if is_gone:
            self._take_standby(start)
        else:
            self._table.cancel_start(start)
            self.fail_start(start.key, Unavailable("the device slot of the replica before"))

    def _members(self, key: VersionKey) -> list[VersionReplica]:
        return [VersionReplica(each.runtime_id, each.state, each.since_us) for each in self._table.replicas_of(key)]

    def _without_successor(self, key: VersionKey) -> tuple[str, ...]:
        """Return the relieved replicas for which no new one is starting."""
        return choose_replicas_to_keep(len(self._table.starts_of(key)), self._members(key))

    def _release_surplus(self, key: VersionKey, wanted: int) -> None:
        """Cancel starts, and drain or end replicas, until `wanted` are left."""
        starts = self._table.starts_of(key)
        leaving = plan_scale_down(len(starts), self._members(key), wanted)
        for start in starts[len(starts) - leaving.starts :]:
            self._table.cancel_start(start)
        for runtime_id in leaving.drained:
            self.drain(self._fleet[runtime_id])
        for runtime_id in leaving.ended:
            self._fleet.end(self._fleet[runtime_id])

    def sleep(self, key: VersionKey, level: Level) -> None:
        """Put the version's only replica to sleep, one level per call. Idempotent. Does nothing if other replicas serve
        too, or if it sleeps as deeply already.
        """
        serving = [replica for replica in self._table.replicas_of(key) if replica.state is ReplicaState.READY]
        if len(serving) == self._table.live_count(key) == 1:
            process = self._fleet[serving[0].runtime_id]
            revision = self._sleeper.begin_sleep(serving[0])
            self._fleet.tasks.start(self._put_to_sleep(process, revision), f"sleep {process.runtime_id}")
        elif level is Level.DEEP_SLEEP:
            for sleeper in self._sleepers_with_weights(key):
                self._sleeper.release_weights(sleeper)

    async def _put_to_sleep(self, process: RuntimeProcess, revision: int) -> None:
        match await self._sleeper.finish_sleep(process, revision):
            case ReplicaState.READY:
                self.notify_ready(self._table[process.runtime_id])
            case ReplicaState.RESTORING:
                self._resume(process)
            case ReplicaState.DOZING:
                self.drain(process)

    def _sleepers_with_weights(self, key: VersionKey | None = None) -> list[Replica]:
        """Return the sleeping replicas that keep their weights in memory. The one that has slept longest is first."""
        return [replica for replica in self._table.sleepers(key) if replica.state is ReplicaState.ASLEEP]

    def mark_ready(
        self,
        process: RuntimeProcess,
        max_streams: int,
        spans: tuple[StageSpan, ...],
        bytes_by_tier: Mapping[str, int] = MappingProxyType({}),
        url: str = "",
    ) -> None:
        """Mark a restored replica as ready; tell activators and listeners. Ignores a replica that is leaving."""
        if process.is_leaving:
            return
        changes = {"max_streams": max_streams, "restore": spans, "bytes_by_tier": bytes_by_tier, "url": url}
        replica = self._table.apply_event(process.runtime_id, ReplicaEvent.BOUND, self._now(), **changes)
        self._feed.publish(Feed(replicas=(replica_row(replica),)))
        assert replica.key is not None
        self._release_surplus(replica.key, self._table.live_count(replica.key))
        took_us = max((span.after_us for span in spans), default=0)
        fields = {"version": str(replica.key), "runtime_id": replica.runtime_id, "restore_ms": took_us / 1000}
        log.info("a replica is ready", extra=fields)
        self.notify_ready(replica)

    def notify_ready(self, replica: Replica) -> None:
        """Tell listeners about a replica that serves."""
        assert replica.key is not None
        self._failed_attempts.pop(replica.key, None)
        self._waking.pop(replica.runtime_id, None)
        notify(self._listeners, lambda listener: listener.on_replica_ready(replica))

    def fail_start(self, key: VersionKey, failure: Failure) -> None:
        """Record a failed start. Waiting requests fail only if no other replica serves or is starting."""
        self._failed_attempts.pop(key, None)
        for runtime_id in self._without_successor(key):
            self._table.apply_event(runtime_id, ReplicaEvent.KEPT, self._now())
            log.warning("a replica stays: none took its place", extra={"runtime_id": runtime_id})
        notify(self._listeners, lambda listener: listener.on_start_failed(key, failure))
        # Last, because a request that fails copies the start problem into its timeline.
        self._fail_waiting_requests(key, failure)

    def _fail_waiting_requests(self, key: VersionKey, failure: Failure) -> None:
        if self._table.live_count(key) == 0:
            self._feed.publish(Feed(failures=(RestoreFailure.from_failure(key.tenant, key.version, failure),)))

    def drain(self, process: RuntimeProcess) -> None:
        """Drain a serving replica in the background: it finishes its requests, and ends."""
        self._begin_drain(process, drain_and_end)

    def _begin_drain(self, process: RuntimeProcess, end_replica: EndReplica) -> None:
        replica = self._table[process.runtime_id]
        if replica.state is not ReplicaState.DRAINING:
            replica = self._table.apply_event(process.runtime_id, ReplicaEvent.DRAIN, self._now())
        revision = self._feed.publish(Feed(replicas=(replica_row(replica),)))
        work = end_replica(self._fleet, self._feed, process, revision, self._drain_s, self._term_s)
        self._fleet.tasks.start(work, f"drain {process.runtime_id}")

    def _begin(self, key: VersionKey, requested_us: int) -> bool:
        """Start or wake a replica. Return False if no device slot is free."""
        try:
            if self._try_wake(key, requested_us):
                return True
            self._take_standby(self._table.add_start(key, requested_us))
        except NoSlot:
            return False
        return True

    def _take_standby(self, start: Start) -> None:
        """Give a standby to a start that has its slot. If none is parked, wait for one in the background."""
        key, decided_us = start.key, self._now()
        process = self._pool.try_take()
        if process is not None:
            self._restore_on(process, start, decided_us)
            self._pool.balance()  # after the bind, in the order of tasks
        else:
            self._fleet.tasks.start(self._await_standby(start, decided_us), f"start {key}")
            self.on_start_waiting(key)
        notify(
            self._start_listeners,
            lambda listener: listener(key, start.requested_us, parked=process is not None, wake_level=None),
        )

    def _try_wake(self, key: VersionKey, requested_us: int) -> bool:
        """Wake a replica that sleeps or is falling asleep. Return False if there is none. Raises NoSlot."""
        dozing = [replica for replica in self._table.replicas_of(key) if replica.state is ReplicaState.DOZING]
        replica = next(iter((*self._table.sleepers(key), *dozing)), None)
        if replica is None:
            return False
        self._table.wake(replica.runtime_id, self._now())
        self._waking[replica.runtime_id] = _PendingStart(key, requested_us, self._now(), is_wake=True)
        level = Level(replica.state) if replica.state in SLEEPING else Level.ASLEEP
        notify(self._start_listeners, lambda listener: listener(key, requested_us, parked=True, wake_level=level))
        if replica.state in SLEEPING:
            self._resume(self._fleet[replica.runtime_id])
        return True

    def _resume(self, process: RuntimeProcess) -> None:
        """Wake a sleeping replica that was requested."""
        pending = self._waking.pop(process.runtime_id)
        key = pending.key
        log.info("a replica wakes", extra={"version": str(key), "runtime_id": process.runtime_id})
        work = self._restore(process, lambda: self._sleeper.wake(process, key, RESTORE_S), pending)
        self._fleet.tasks.start(work, f"wake {key}")

    async def _await_standby(self, start: Start, decided_us: int) -> None:
        try:
            process = await self._pool.take(STANDBY_WAIT_S)
        except Refused as refused:
            if self._table.is_pending(start):
                self._table.cancel_start(start)
                self.fail_start(start.key, refused.failure)
            return
        if self._table.is_pending(start):
            self._restore_on(process, start, decided_us)
        else:
            self._pool.put_back(process)

    def _restore_on(self, process: RuntimeProcess, start: Start, decided_us: int) -> None:
        """Bind the start to the standby before anything else can run, then call the runtime in the background."""
        threads = self._cpu_share.threads(self._table.slots_sharing_threads)
        key, device_class = start.key, f"cpu-{threads}"
        self._table.bind(start, process.runtime_id, self._now(), device_class)
        log.info("a standby takes a version", extra={"version": str(key), "runtime_id": process.runtime_id})

        async def bind() -> BindResponse:  # an error in here fails the restore, which frees the slot
            bind_request = BindRequest(
                tenant=key.tenant,
                model=key.model,
                version=key.version,
                device_class=device_class,
                threads=threads,
                kv_bytes=self._cpu_share.kv_bytes(),
            )
            return await process.bind(bind_request, RESTORE_S)

        pending = _PendingStart(key, start.requested_us, decided_us)
        self._fleet.tasks.start(self._restore(process, bind, pending), f"restore {key}")

    async def _restore(
        self, process: RuntimeProcess, bind: Callable[[], Awaitable[BindResponse]], pending: _PendingStart
    ) -> None:
        key, began_us, requested_us = pending.key, self._now(), pending.requested_us
        try:
            bound = await bind()
            if process.is_gone:
                raise Refused(Unavailable("the runtime"))
        except Refused as refused:
            await self._handle_failed_restore(process, pending, refused.failure, began_us)
        except Exception:
            log.exception("a restore failed unexpectedly", extra={"version": str(key)})
            await self._handle_failed_restore(process, pending, Internal(), began_us)
        else:
            spans = (
                StageSpan(Stage.DECIDED, pending.decided_us - requested_us),
                StageSpan(Stage.PROMOTED, began_us - requested_us),
                *(StageSpan(span.stage, span.after_us + began_us - requested_us) for span in bound.spans),
            )
            self.mark_ready(process, bound.max_streams, spans, bound.bytes_by_tier, bound.url)
        await self._fleet.clock.sleep(READY_HOLDS_CORES_S + 0.01)  # timers may be a moment early
        self._pool.balance()

    async def _handle_failed_restore(
        self, process: RuntimeProcess, pending: _PendingStart, failure: Failure, began_us: int
    ) -> None:
        if process.is_ending:
            return  # it was told to end meanwhile
        key = pending.key
        was_lost = isinstance(failure, Unavailable) or failure.code == "conflict"  # dead, or not parked after all
        was_lost |= pending.is_wake  # a failed wake does not blame the version: start another replica
        if self._now() - began_us >= RESTORE_S * 1e6:
            failure, was_lost = DeadlineExceeded(RESTORE_S, "restoring the version"), False
        self._fleet.end(process, term_s=0.0 if was_lost else 1.0)
        # From here on, at any await, `apply` removes the entry if no replica of the version is wanted any more.
        attempt = self._failed_attempts[key] = self._failed_attempts.get(key, 0) + 1
        if failure.code == Overloaded.code and (sleepers := self._sleepers_with_weights()):
            # Memory of sleepers goes to requested versions. The one that has slept longest goes first.
            was_lost = await self._evict_sleeper(self._fleet[sleepers[0].runtime_id])
            attempt = 1
            if key in self._failed_attempts:
                self._failed_attempts[key] = attempt
        log.warning("a restore failed", extra={"version": str(key), "why": failure.message, "attempt": attempt})
        # Something that the restore needs went away: usually the cache agent, which is restarted. The next start waits
        # for it.
        was_left = not was_lost and failure.code == Unavailable.code and attempt == 1
        if not (was_lost or was_left) or attempt == MAX_ATTEMPTS:
            self.fail_start(key, crash_loop() if was_lost else failure)
            return
        await process.wait_gone(EXIT_WAIT_S)  # until then it holds its slot
        is_wanted = key in self._failed_attempts and self._table.live_count(key) == 0
        if (is_wanted or self._without_successor(key)) and not self._begin(key, pending.requested_us):
            self.fail_start(key, failure)

    async def _evict_sleeper(self, sleeper: RuntimeProcess) -> bool:
        """End a sleeping replica. Return whether its memory is free now."""
        log.info("a sleeping replica is ended for its memory", extra={"runtime_id": sleeper.runtime_id})
        self._fleet.end(sleeper)
        return await sleeper.wait_gone(EXIT_WAIT_S)

    def _handle_exit(self, replica: Replica) -> None:
        if replica.key is None:
            return
        self._waking.pop(replica.runtime_id, None)
        if replica.max_streams:  # it was in the feed
            self._feed.publish(Feed(removed_replicas=(replica.runtime_id,)))
        notify(self._listeners, lambda listener: listener.on_replica_lost(replica))

    def _now(self) -> int:
        return self._fleet.clock.monotonic_us()
