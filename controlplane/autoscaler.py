"""Turn reports of concurrency into replicas: observe, decide, apply. The decisions are in `policy/kpa.py` and
`policy/idle.py`.

Every version in use is looked at each tick, and one at zero at once when it is requested. Versions that nobody uses
cost nothing. The loop converges: a replica that died is missed at the next look, and replaced.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from contracts.control import ConcurrencyStat, Stats
from contracts.errors import Failure, Refused
from controlplane.clock import Clock
from controlplane.facts import Model, Version, VersionKey
from controlplane.feed import FeedHub
from controlplane.minimums import Minimums
from controlplane.policy.breakeven import Gaps, Level, Step
from controlplane.policy.kpa import TICK_S
from controlplane.policy.reclaim import MIN_IDLE_S, Holder, choose
from controlplane.policy.replica_life import ReplicaState
from controlplane.policy.scale_settings import ScaleSettings
from controlplane.replicas import Replica
from controlplane.scaled import Scaled
from controlplane.takeover import Takeover
from controlplane.tasks import Tasks
from service.loops import isolated

log = logging.getLogger(__name__)

_US: Final = 1_000_000


class Actuator(Protocol):
    """Starts and ends replicas. All calls return at once."""

    @property
    def slots(self) -> int | None:
        """The number of device slots; None if it has no bound."""
        ...

    def apply(self, key: VersionKey, replicas: int, asked_us: int) -> None:
        """Have that many replicas of the version. Idempotent. Accepted on return, not done."""

    def sleep(self, key: VersionKey, level: Level) -> None:
        """Have the version's only replica asleep. Idempotent; one level at a time: asked again, it sleeps deeper."""

    def ready(self, key: VersionKey) -> int: ...

    def live(self, key: VersionKey) -> int: ...

    def begun(self, key: VersionKey) -> int:
        """Return how many of `live` have a process already."""
        ...

    def present(self, key: VersionKey) -> int: ...

    def in_use(self) -> tuple[VersionKey, ...]: ...

    def has_room(self) -> bool: ...

    def leaving(self) -> int: ...


class Versions(Protocol):
    """Models and versions, from memory."""

    def find(self, key: VersionKey) -> tuple[Model, Version] | None: ...

    def every_model(self) -> tuple[Model, ...]: ...

    async def resume(self, key: VersionKey, stopped_at_s: int) -> None:
        """Record that a version that was stopped at `stopped_at_s` is requested again. Raises Refused."""
        ...


Steps = Callable[[Model, Version], Sequence[Step]]  # when the version's last replica goes to which level


class Autoscaler:
    """Scales all versions of an installation. Also the actuator's listener: failures and deaths change what may start.

    Three facts keep a version from running, each with its own owner:

    - Suspended: its tenant may not run anything. Owner: the tenants' table.
    - Stopped: an operator stopped it. Its minimum does not hold until it is requested again. Owner: the registry.
    - Taken away: its replicas made room for another version. Owner: `Scaled`, in memory only.

    After a takeover the load is unknown. So no replica is removed for a stable window. By break-even, or to make room
    for a requested version, none is removed until every activator has reported. Starts go on at once.
    """

    def __init__(
        self, versions: Versions, actuator: Actuator, clock: Clock, tasks: Tasks, steps: Steps, feed: FeedHub
    ) -> None:
        self.gaps: Gaps[VersionKey] = Gaps()
        self._versions = versions
        self._actuator = actuator
        self._steps = steps
        self._clock = clock
        self._tasks = tasks
        self._feed = feed
        self._takeover = Takeover(feed.reader_names)
        self._minimums = Minimums(versions.every_model, actuator, feed)
        self._resuming: set[VersionKey] = set()
        self._scaled: dict[VersionKey, Scaled] = {}
        self._awaiting_room: dict[VersionKey, None] = {}  # in order of asking
        self._short: dict[VersionKey, int] = {}  # replicas that are wanted and have no slot
        self._retrying: set[VersionKey] = set()
        self.on_placing: Callable[[VersionKey], None] = lambda _: None  # a start waits for a device slot
        self.on_room_changed: Callable[[VersionKey, bool], None] = lambda *_: None  # True: no slot is free

    def __repr__(self) -> str:
        return f"<Autoscaler versions={len(self._scaled)} awaiting_room={len(self._awaiting_room)}>"

    @property
    def pending(self) -> int:
        """Replicas that are wanted and have no device slot."""
        return sum(self._short.values())

    def observe(self, stats: Stats) -> None:
        """Take an activator's reports in. A version at zero that is asked for is decided on before this returns."""
        self._takeover.record_report(stats.activator, self._now_s())
        for stat in stats.stats:
            key = VersionKey(stat.tenant, stat.model, stat.version)
            with isolated(key):
                self._observe(key, stat)

    def tick(self) -> None:
        """Look at every version that is in use or has a minimum."""
        for key in (*self._actuator.in_use(), *(key for key, _ in self._minimums.every())):
            with isolated(key):
                self._ensure(key)
        self._minimums.bound(self._tenants_at_zero())
        for scaled in tuple(self._scaled.values()):
            with isolated(scaled.key):
                self._look(scaled)
            with isolated(scaled.key):
                if not self._actuator.present(scaled.key) and scaled.is_forgettable(self._now_s()):
                    self._drop_wish(scaled.key)
                    del self._scaled[scaled.key]

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """Scale versions to zero now. The registry and the tenants decide whether they may start again."""
        for key in keys:
            with isolated(key):
                self._empty(self._ensure(key))

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """See `Minimums.check`."""
        self._minimums.check(model, scale)

    def least(self, model: Model, version: Version) -> int:
        """See `Minimums.least`."""
        return self._minimums.least(model, version)

    async def run(self) -> None:
        """Tick until cancelled, on a fixed beat. A missed beat is skipped."""
        self._takeover.begin(self._now_s())
        due_us = self._clock.monotonic_us()
        while True:
            self.tick()
            due_us = max(due_us + int(TICK_S * _US), self._clock.monotonic_us())
            await self._clock.sleep((due_us - self._clock.monotonic_us()) / _US)

    # -- what the actuator tells --

    def ready(self, replica: Replica) -> None:
        """Record that a replica serves, so no caller waits at zero."""
        if replica.key is not None:
            self._ensure(replica.key).asked_us = None

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """Record that a start failed. The next one waits for a new request, whatever the reason was."""
        scaled = self._ensure(key)
        scaled.asked_us = None
        scaled.start_failed(self._now_s(), at_zero=self._actuator.live(key) == 0)

    def lost(self, replica: Replica) -> None:
        """Replace a replica that died, and give its slot to a version that waits for one."""
        if replica.key is not None and (scaled := self._scaled.get(replica.key)) is not None:
            scaled.process_died(self._now_s(), served=replica.state is ReplicaState.READY)
            if replica.state is ReplicaState.READY:
                with isolated(scaled.key):
                    self._look(scaled)
        self.room()

    def room(self) -> None:
        """Give a slot that may have come free to the version that has waited longest."""
        for key in tuple(self._awaiting_room):
            if not self._actuator.has_room():
                break
            del self._awaiting_room[key]
            with isolated(key):
                self._look(self._ensure(key))

    def check_integrity(self) -> None:
        """Assert that every version's windows add up, and that versions that wait for room are known."""
        for scaled in self._scaled.values():
            scaled.check_integrity()
        assert set(self._awaiting_room) <= set(self._scaled)
        assert set(self._short) <= set(self._scaled)

    # -- deciding --

    def _observe(self, key: VersionKey, stat: ConcurrencyStat) -> None:
        found = self._versions.find(key)
        if found is None or self._feed.is_suspended(key.tenant):
            return  # as Knative's collector drops reports about unknown revisions
        scaled = self._ensure(key)
        present = self._actuator.present(key)
        asks = scaled.record(stat.concurrency, stat.requests, present, self._now_s())
        if asks:
            self.gaps.busy(key, self._now_s())
            if found[1].stopped_at_s is not None:
                self._resume(key, found[1].stopped_at_s)
        if asks and self._actuator.live(key) == 0:
            if scaled.asked_us is None:
                scaled.asked_us = self._clock.monotonic_us()
            self._look(scaled)

    def _look(self, scaled: Scaled) -> None:
        found, key = self._versions.find(scaled.key), scaled.key
        now_us = self._clock.monotonic_us()
        if found is None or self._feed.is_suspended(key.tenant):
            self._drop_wish(key)
            self._actuator.apply(key, 0, now_us)
            return
        model, version = found
        live, now = self._actuator.live(key), now_us / _US
        ready = self._actuator.ready(key)
        # Idle replicas of a tenant with a spent budget end. A version with running requests is reported each second.
        is_idle = now - scaled.asked_s >= MIN_IDLE_S and self._takeover.is_known(model, now)
        if is_idle and self._feed.is_spent(key.tenant) and self._actuator.present(key):
            self._empty(scaled)
            return
        want = scaled.decide(
            model,
            version,
            least=self._minimums.least(model, version),
            ready=ready,
            live=live,
            steps=lambda: self._steps(model, version),
            now=now,
        )
        if isinstance(want, Level):
            self._drop_wish(key)  # the callers have gone
            if self._takeover.is_known(model, now):
                if want is Level.ZERO:
                    self._actuator.apply(key, 0, now_us)
                else:
                    self._actuator.sleep(key, want)
            return
        if want is None:
            return
        if want < live and not self._takeover.is_window_over(model, now):
            want = max(want, self._actuator.begun(key))
        if want > live and not scaled.may_start(now, least=self._minimums.least(model, version)):
            self._look_later(scaled, now)
            if key in self._short and live == 0:
                return  # still no device slot
            want = live
        is_asked = scaled.asked_us is not None
        if want > live == 0 and not self._actuator.has_room():
            self._lacks_room(key, want)
            if self._makes_room(key, now, is_asked=is_asked):
                if key not in self._awaiting_room:
                    self.on_placing(key)
                self._awaiting_room[key] = None
                return
            self._awaiting_room.pop(key, None)
            if is_asked:
                self._actuator.apply(key, want, now_us)  # tells waiting requests that there is no room
                scaled.has_no_room(now)
            return
        self._drop_wish(key)
        self._actuator.apply(key, want, now_us if scaled.asked_us is None else scaled.asked_us)
        live = self._actuator.live(key)
        if want > live:
            self._short[key] = want - live
            # Its minimum is a promise: room for each of those replicas is made, one at a time.
            if live < self._minimums.least(model, version) and self._makes_room(key, now, is_asked=False):
                self._awaiting_room[key] = None

    def _lacks_room(self, key: VersionKey, want: int) -> None:
        self._short[key] = want
        self.on_room_changed(key, True)

    def _drop_wish(self, key: VersionKey) -> None:
        """The version no longer waits for a device slot."""
        self._awaiting_room.pop(key, None)
        if self._short.pop(key, None) is not None:
            self.on_room_changed(key, False)

    def _look_later(self, scaled: Scaled, now: float) -> None:
        """Somebody asked too soon after a failure: look again as soon as a start may be tried."""
        key, wait_s = scaled.key, scaled.wait_s(now)
        if scaled.asked_us is None or wait_s == 0.0 or key in self._retrying:
            return

        async def look() -> None:
            try:
                await self._clock.sleep(wait_s + 0.001)  # over, not on, the edge: clocks round
            finally:
                self._retrying.discard(key)
            self._look(self._ensure(key))

        self._retrying.add(key)
        self._tasks.start(look(), f"look again at {key}")

    def _makes_room(self, key: VersionKey, now: float, *, is_asked: bool) -> bool:
        """Return whether a slot will come free for `key`: a replica is ending, or an idle one is ended for it."""
        others = len(self._awaiting_room) - (key in self._awaiting_room)
        if self._actuator.leaving() > others:
            return True
        if is_asked:
            self._minimums.bound({key.tenant} | self._tenants_at_zero())
        # For a minimum without requests, end other tenants' replicas only up to the tenant's share. Otherwise it would
        # take back at once the slots that it gave up for another tenant's requests.
        may_take_others = is_asked or self._minimums.is_below_share(key.tenant)
        # Of those alone that serve: thousands may want a slot at once, and each comes by here.
        holders = (
            Holder(each, ready, self._actuator.live(each), self._minimums.least(*found), scaled.asked_s)
            for each in self._actuator.in_use()
            if (may_take_others or each.tenant == key.tenant)
            and (scaled := self._scaled.get(each)) is not None
            and (ready := self._actuator.ready(each))
            and (found := self._versions.find(each)) is not None
            and self._takeover.is_known(found[0], now)
        )
        victim = choose(holders, now)
        if victim is None:
            return False
        left = self._actuator.live(victim) - 1
        self._drop_wish(victim)
        self._scaled[victim].taken_away(now, left)
        self._actuator.apply(victim, left, self._clock.monotonic_us())
        return True

    def _tenants_at_zero(self) -> set[str]:
        """Return the tenants that wait for a version's first device slot, not for more of a minimum."""
        return {key.tenant for key in self._awaiting_room if self._actuator.live(key) == 0}

    def _empty(self, scaled: Scaled) -> None:
        """Scale the version to zero. New requests start it again if it may run."""
        self._drop_wish(scaled.key)
        scaled.taken_away(self._now_s(), left=0)
        self._actuator.apply(scaled.key, 0, self._clock.monotonic_us())

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

    def _ensure(self, key: VersionKey) -> Scaled:
        scaled = self._scaled.get(key)
        if scaled is None:
            found = self._versions.find(key)
            window_s = found[0].scale.window_s if found is not None else 60.0
            scaled = self._scaled[key] = Scaled(key, window_s, self._actuator.ready(key), self._now_s())
            if found is not None and found[1].stopped_at_s is not None:
                scaled.taken_away(self._now_s(), left=0)  # replicas that still finish their streams are no demand
        return scaled

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / _US
