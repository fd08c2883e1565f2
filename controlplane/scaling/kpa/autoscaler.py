"""Turn reports of concurrency into replicas: observe, decide, apply. The decisions are in `scaling/policy/kpa.py` and
`scaling/policy/scale_to_zero.py`.

Each tick evaluates every version in use. A version at zero is also evaluated at once when it is requested. Unused
versions cost nothing. The loop converges: a replica that died is missing at the next tick, and is replaced.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from controlplane.clock import Clock
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.kpa.minimums import Minimums
from controlplane.scaling.kpa.report_coverage import ReportCoverage
from controlplane.scaling.kpa.version_scaler import VersionScaler
from controlplane.scaling.policy.breakeven import IdleGaps, Level, LevelChange
from controlplane.scaling.policy.kpa import TICK_S
from controlplane.scaling.policy.reclaim import MIN_IDLE_S, SlotHolder, choose_victim
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.replicas import Replica
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import ConcurrencyStat, Stats
from kelvin.process.loops import contain_errors

log = logging.getLogger(__name__)

_US: Final = 1_000_000


class Actuator(Protocol):
    """Starts and ends replicas. All calls return at once."""

    @property
    def slots(self) -> int | None:
        """Return the number of device slots; None if it has no bound."""
        ...

    def apply(self, key: VersionKey, replicas: int, requested_us: int) -> None:
        """Scale the version to that many replicas. Idempotent. On return the order is accepted, not carried out."""

    def sleep(self, key: VersionKey, level: Level) -> None:
        """Put the version's only replica to sleep, one level per call, until it is at `level`. Idempotent."""

    def ready_count(self, key: VersionKey) -> int: ...

    def live_count(self, key: VersionKey) -> int: ...

    def started_count(self, key: VersionKey) -> int:
        """Return how many of `live_count` have a process already."""
        ...

    def process_count(self, key: VersionKey) -> int: ...

    def active_versions(self) -> tuple[VersionKey, ...]: ...

    def has_room(self) -> bool: ...

    def leaving_count(self) -> int: ...


class VersionLookup(Protocol):
    """Models and versions, from memory."""

    def find(self, key: VersionKey) -> tuple[Model, Version] | None: ...

    def all_models(self) -> tuple[Model, ...]: ...

    async def resume(self, key: VersionKey, stopped_at_s: int) -> None:
        """Record that a version that was stopped at `stopped_at_s` is requested again. Raises Refused."""
        ...


PlanLevels = Callable[[Model, Version], Sequence[LevelChange]]  # when a version's last replica changes its level


class Autoscaler:
    """Scales all versions of an installation. Also the actuator's listener: failures and deaths change what may start.

    Three facts keep a version from running, each with its own owner:

    - Suspended: its tenant may not run anything. Owner: the tenants' table.
    - Stopped: an operator stopped it. Its minimum does not hold until it is requested again. Owner: the registry.
    - Taken away: its replicas made room for another version. Owner: `VersionScaler`, in memory only.

    After a takeover the load is unknown, so no replica is removed for one stable window. A removal by break-even, or to
    make room for a requested version, waits until every activator has reported. No start is delayed.
    """

    def __init__(
        self,
        versions: VersionLookup,
        actuator: Actuator,
        clock: Clock,
        tasks: Tasks,
        plan_levels: PlanLevels,
        feed: FeedHub,
    ) -> None:
        self.idle_gaps: IdleGaps[VersionKey] = IdleGaps()
        self._versions = versions
        self._actuator = actuator
        self._plan_levels = plan_levels
        self._clock = clock
        self._tasks = tasks
        self._feed = feed
        self._report_coverage = ReportCoverage(feed.reader_names)
        self._minimums = Minimums(versions.all_models, actuator, feed)
        self._resuming: set[VersionKey] = set()
        self._scalers: dict[VersionKey, VersionScaler] = {}
        self._waiting_for_slot: dict[VersionKey, None] = {}  # in order of arrival
        self._missing_replicas: dict[VersionKey, int] = {}  # wanted replicas that have no slot
        self._scheduled_retries: set[VersionKey] = set()
        self.on_start_waiting: Callable[[VersionKey], None] = lambda _: None  # a start waits for a device slot
        self.on_slot_shortage_changed: Callable[[VersionKey, bool], None] = lambda *_: None  # True: no slot is free

    def __repr__(self) -> str:
        return f"<Autoscaler versions={len(self._scalers)} awaiting_room={len(self._waiting_for_slot)}>"

    @property
    def pending(self) -> int:
        """Return how many replicas are wanted and have no device slot."""
        return sum(self._missing_replicas.values())

    def observe(self, stats: Stats) -> None:
        """Record an activator's reports. A version at zero that is requested is evaluated before this returns."""
        self._report_coverage.record_report(stats.activator, self._now_s())
        for stat in stats.stats:
            key = VersionKey(stat.tenant, stat.model, stat.version)
            with contain_errors(key):
                self._observe(key, stat)

    def tick(self) -> None:
        """Evaluate every version that is in use or has a minimum."""
        for key in (*self._actuator.active_versions(), *(key for key, _ in self._minimums.list_all())):
            with contain_errors(key):
                self._ensure_scaler(key)
        self._minimums.apply_bounds(self._tenants_at_zero())
        for scaler in tuple(self._scalers.values()):
            with contain_errors(scaler.key):
                self._evaluate(scaler)
            with contain_errors(scaler.key):
                if not self._actuator.process_count(scaler.key) and scaler.is_forgettable(self._now_s()):
                    self._cancel_slot_wait(scaler.key)
                    del self._scalers[scaler.key]

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """Scale versions to zero now. The registry and the tenants decide whether they may start again."""
        for key in keys:
            with contain_errors(key):
                self._scale_to_zero(self._ensure_scaler(key))

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if `scale` raises the minimum above the tenant's share of the device slots."""
        self._minimums.check(model, scale)

    def effective_minimum(self, model: Model, version: Version) -> int:
        """Return how many replicas of the version must stay, also without requests."""
        return self._minimums.effective_minimum(model, version)

    async def run(self) -> None:
        """Tick at a fixed interval until cancelled. A missed tick is skipped."""
        self._report_coverage.start(self._now_s())
        due_us = self._clock.monotonic_us()
        while True:
            self.tick()
            due_us = max(due_us + int(TICK_S * _US), self._clock.monotonic_us())
            await self._clock.sleep((due_us - self._clock.monotonic_us()) / _US)

    # -- callbacks of the actuator --

    def on_replica_ready(self, replica: Replica) -> None:
        """Record that a replica serves, so no caller waits at zero."""
        if replica.key is not None:
            self._ensure_scaler(replica.key).requested_us = None

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """Record that a start failed. The next start waits for a new request, whatever the reason was."""
        scaler = self._ensure_scaler(key)
        scaler.requested_us = None
        scaler.record_failed_start(self._now_s(), at_zero=self._actuator.live_count(key) == 0)

    def on_replica_lost(self, replica: Replica) -> None:
        """Replace a replica that died, and give its slot to a version that waits for one."""
        if replica.key is not None and (scaler := self._scalers.get(replica.key)) is not None:
            scaler.record_exit(self._now_s(), served=replica.state is ReplicaState.READY)
            if replica.state is ReplicaState.READY:
                with contain_errors(scaler.key):
                    self._evaluate(scaler)
        self.assign_free_slots()

    def assign_free_slots(self) -> None:
        """Give slots that may have come free to the versions that have waited longest."""
        for key in tuple(self._waiting_for_slot):
            if not self._actuator.has_room():
                break
            del self._waiting_for_slot[key]
            with contain_errors(key):
                self._evaluate(self._ensure_scaler(key))

    def check_integrity(self) -> None:
        """Assert that every version's windows add up, and that versions that wait for room are known."""
        for scaler in self._scalers.values():
            scaler.check_integrity()
        assert set(self._waiting_for_slot) <= set(self._scalers)
        assert set(self._missing_replicas) <= set(self._scalers)

    # -- decisions --

    def _observe(self, key: VersionKey, stat: ConcurrencyStat) -> None:
        found = self._versions.find(key)
        if found is None or self._feed.is_suspended(key.tenant):
            return  # as Knative's collector drops reports about unknown revisions
        scaler = self._ensure_scaler(key)
        process_count = self._actuator.process_count(key)
        is_requested = scaler.record(stat.concurrency, stat.requests, process_count, self._now_s())
        if is_requested:
            self.idle_gaps.record_request(key, self._now_s())
            if found[1].stopped_at_s is not None:
                self._resume(key, found[1].stopped_at_s)
        if is_requested and self._actuator.live_count(key) == 0:
            if scaler.requested_us is None:
                scaler.requested_us = self._clock.monotonic_us()
            self._evaluate(scaler)

    def _evaluate(self, scaler: VersionScaler) -> None:
        found, key = self._versions.find(scaler.key), scaler.key
        now_us = self._clock.monotonic_us()
        if found is None or self._feed.is_suspended(key.tenant):
            self._cancel_slot_wait(key)
            self._actuator.apply(key, 0, now_us)
            return
        model, version = found
        live, now = self._actuator.live_count(key), now_us / _US
        ready = self._actuator.ready_count(key)
        # End idle replicas of a tenant whose budget is spent. A version with running requests is reported each second.
        is_idle = now - scaler.last_request_s >= MIN_IDLE_S and self._report_coverage.is_known_idle(model, now)
        if is_idle and self._feed.is_spent(key.tenant) and self._actuator.process_count(key):
            self._scale_to_zero(scaler)
            return
        minimum = self._minimums.effective_minimum(model, version)
        want = scaler.decide(
            model,
            version,
            minimum=minimum,
            ready=ready,
            live=live,
            level_changes=lambda: self._plan_levels(model, version),
            now=now,
        )
        if want is None:
            return
        if isinstance(want, Level):
            self._apply_level(model, key, want, now_us)
            return
        if want < live and not self._report_coverage.is_window_over(model, now):
            want = max(want, self._actuator.started_count(key))
        if want > live and not scaler.may_start(now, minimum=minimum):
            self._evaluate_later(scaler, now)
            if key in self._missing_replicas and live == 0:
                return  # there is still no device slot
            want = live
        if want > live == 0 and not self._actuator.has_room():
            self._wait_for_slot(scaler, want, now_us)
            return
        self._cancel_slot_wait(key)
        self._actuator.apply(key, want, now_us if scaler.requested_us is None else scaler.requested_us)
        live = self._actuator.live_count(key)
        if want > live:
            self._missing_replicas[key] = want - live
            # A minimum is a promise, so make room for each missing replica, one at a time.
            if live < minimum and self._make_room(key, now, is_requested=False):
                self._waiting_for_slot[key] = None

    def _apply_level(self, model: Model, key: VersionKey, level: Level, now_us: int) -> None:
        """Move the last replica to `level`, unless an activator may still have requests for it."""
        self._cancel_slot_wait(key)  # no caller waits any more
        if not self._report_coverage.is_known_idle(model, now_us / _US):
            return
        if level is Level.ZERO:
            self._actuator.apply(key, 0, now_us)
        else:
            self._actuator.sleep(key, level)

    def _wait_for_slot(self, scaler: VersionScaler, want: int, now_us: int) -> None:
        """Wait for a device slot if one will come free. Otherwise fail the requests that wait for the version."""
        key, is_requested = scaler.key, scaler.requested_us is not None
        self._missing_replicas[key] = want
        self.on_slot_shortage_changed(key, True)
        if self._make_room(key, now_us / _US, is_requested=is_requested):
            if key not in self._waiting_for_slot:
                self.on_start_waiting(key)
            self._waiting_for_slot[key] = None
            return
        self._waiting_for_slot.pop(key, None)
        if is_requested:
            self._actuator.apply(key, want, now_us)  # fails the waiting requests: there is no room
            scaler.record_slot_refusal(now_us / _US)

    def _cancel_slot_wait(self, key: VersionKey) -> None:
        """Stop waiting for a device slot."""
        self._waiting_for_slot.pop(key, None)
        if self._missing_replicas.pop(key, None) is not None:
            self.on_slot_shortage_changed(key, False)

    def _evaluate_later(self, scaler: VersionScaler, now: float) -> None:
        """After a failed start, evaluate the version again as soon as another start may be tried."""
        key, retry_in_s = scaler.key, scaler.retry_in_s(now)
        if scaler.requested_us is None or retry_in_s == 0.0 or key in self._scheduled_retries:
            return

        async def evaluate_again() -> None:
            try:
                await self._clock.sleep(retry_in_s + 0.001)  # clocks round, so sleep a little longer
            finally:
                self._scheduled_retries.discard(key)
            self._evaluate(self._ensure_scaler(key))

        self._scheduled_retries.add(key)
        self._tasks.start(evaluate_again(), f"evaluate {key} again")

    def _make_room(self, key: VersionKey, now: float, *, is_requested: bool) -> bool:
        """Return whether a slot will come free for `key`: a replica is ending, or an idle one is ended now."""
        others = len(self._waiting_for_slot) - (key in self._waiting_for_slot)
        if self._actuator.leaving_count() > others:
            return True
        if is_requested:
            self._minimums.apply_bounds({key.tenant} | self._tenants_at_zero())
        # For a minimum without requests, end other tenants' replicas only up to the tenant's share. Otherwise it would
        # take back at once the slots that it gave up for another tenant's requests.
        may_take_others = is_requested or self._minimums.is_below_share(key.tenant)
        # Look only at versions that serve: thousands may want a slot at once, and each of them runs this.
        holders = (
            SlotHolder(
                each,
                ready,
                self._actuator.live_count(each),
                self._minimums.effective_minimum(*found),
                scaler.last_request_s,
            )
            for each in self._actuator.active_versions()
            if (may_take_others or each.tenant == key.tenant)
            and (scaler := self._scalers.get(each)) is not None
            and (ready := self._actuator.ready_count(each))
            and (found := self._versions.find(each)) is not None
            and self._report_coverage.is_known_idle(found[0], now)
        )
        victim = choose_victim(holders, now)
        if victim is None:
            return False
        left = self._actuator.live_count(victim) - 1
        self._cancel_slot_wait(victim)
        self._scalers[victim].reset_demand(now, left)
        self._actuator.apply(victim, left, self._clock.monotonic_us())
        return True

    def _tenants_at_zero(self) -> set[str]:
        """Return the tenants that wait for a version's first device slot, not for more of a minimum."""
        return {key.tenant for key in self._waiting_for_slot if self._actuator.live_count(key) == 0}

    def _scale_to_zero(self, scaler: VersionScaler) -> None:
        """Scale the version to zero. New requests start it again if it may run."""
        self._cancel_slot_wait(scaler.key)
        scaler.reset_demand(self._now_s(), left=0)
        self._actuator.apply(scaler.key, 0, self._clock.monotonic_us())

    def _resume(self, key: VersionKey, stopped_at_s: int) -> None:
        """Record that this stop is over. If that fails, the next report tries again."""

        async def record() -> None:
            try:
                await self._versions.resume(key, stopped_at_s)
            except Refused as refused:
                log.warning("the end of a stop is not recorded", extra={"version": str(key), "why": str(refused)})
            finally:
                self._resuming.discard(key)

        if key not in self._resuming:
            self._resuming.add(key)
            self._tasks.start(record(), f"resume {key}")

    def _ensure_scaler(self, key: VersionKey) -> VersionScaler:
        scaler = self._scalers.get(key)
        if scaler is None:
            found = self._versions.find(key)
            window_s = found[0].scale.window_s if found is not None else 60.0
            scaler = self._scalers[key] = VersionScaler(key, window_s, self._actuator.ready_count(key), self._now_s())
            if found is not None and found[1].stopped_at_s is not None:
                scaler.reset_demand(self._now_s(), left=0)  # draining replicas are no demand
        return scaler

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / _US
