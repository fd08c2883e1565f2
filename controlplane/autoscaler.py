"""The loop that turns reports of concurrency into replicas: observe, decide, apply. How to decide is `policy`'s.

Every version in use is looked at each tick; one at zero at once, when somebody asks for it. Versions that nobody uses
cost nothing. The loop converges: what died is missed at the next look, and made up for.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from contracts.control import Stats
from contracts.errors import Failure
from controlplane.clock import Clock
from controlplane.facts import Model, ScaleSettings, Version, VersionKey
from controlplane.policy.breakeven import Gaps, Level, Step
from controlplane.policy.kpa import TICK_S
from controlplane.policy.reclaim import Holder, choose
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica
from controlplane.scaled import Scaled
from controlplane.tasks import Tasks

log = logging.getLogger(__name__)

_US: Final = 1_000_000


class Actuator(Protocol):
    """Where replicas come from and go to. All calls return at once."""

    def apply(self, key: VersionKey, replicas: int, asked_us: int) -> None:
        """Idempotent. Accepted on return, not done."""

    def sleep(self, key: VersionKey, level: Level) -> None:
        """Have the version's only replica asleep. Idempotent; one level at a time: asked again, it sleeps deeper."""

    def ready(self, key: VersionKey) -> int: ...

    def live(self, key: VersionKey) -> int: ...

    def present(self, key: VersionKey) -> int: ...

    def in_use(self) -> tuple[VersionKey, ...]: ...

    def has_room(self) -> bool: ...

    def leaving(self) -> int: ...


class Versions(Protocol):
    """What is known of versions, from memory."""

    def find(self, key: VersionKey) -> tuple[Model, Version] | None: ...

    def every_model(self) -> tuple[Model, ...]: ...


class Economy(Protocol):
    """What warmth costs."""

    def steps(self, model: Model, version: Version) -> Sequence[Step]:
        """When the version's last replica goes where."""
        ...


class Autoscaler:
    """One per installation. Also the actuator's listener: failures and deaths change what may be tried."""

    def __init__(self, versions: Versions, actuator: Actuator, clock: Clock, tasks: Tasks, economy: Economy) -> None:
        self.gaps: Gaps[VersionKey] = Gaps()
        self._versions = versions
        self._actuator = actuator
        self._economy = economy
        self._clock = clock
        self._tasks = tasks
        self._scaled: dict[VersionKey, Scaled] = {}
        self._awaiting_room: dict[VersionKey, None] = {}  # in order of asking
        self._short: dict[VersionKey, int] = {}  # replicas that are wanted and have no slot
        self._retrying: set[VersionKey] = set()
        self.on_placing: Callable[[VersionKey], None] = lambda _: None  # a start waits for a device slot

    def __repr__(self) -> str:
        return f"<Autoscaler versions={len(self._scaled)} awaiting_room={len(self._awaiting_room)}>"

    @property
    def pending(self) -> int:
        """Replicas that are wanted and have no device slot."""
        return sum(self._short.values())

    def observe(self, stats: Stats) -> None:
        """Take an activator's reports in. A version at zero that is asked for is decided on before this returns."""
        for stat in stats.stats:
            key = VersionKey(stat.tenant, stat.model, stat.version)
            if self._versions.find(key) is None:
                continue  # a report about what does not exist is dropped, as Knative's collector does
            scaled = self._ensure(key)
            present = self._actuator.present(key)
            asks = scaled.record(stat.concurrency, stat.requests, present, self._now_s())
            if asks:
                self.gaps.busy(key, self._now_s())
            if asks and self._actuator.live(key) == 0:
                if scaled.asked_us is None:
                    scaled.asked_us = self._clock.monotonic_us()
                self._look(scaled)

    def tick(self) -> None:
        """Look at every version that is in use or has a minimum."""
        for key in self._actuator.in_use():
            self._ensure(key)
        for model in self._versions.every_model():
            if model.scale.min:
                for version in model.named:
                    self._ensure(VersionKey(model.tenant, model.model, version))
        for scaled in tuple(self._scaled.values()):
            try:
                self._look(scaled)
            except Exception:  # a defect in one version's affairs must not stop the others'
                log.exception("a version could not be looked at", extra={"version": str(scaled.key)})
            if not self._actuator.present(scaled.key) and scaled.is_forgettable(self._now_s()):
                self._awaiting_room.pop(scaled.key, None)
                self._short.pop(scaled.key, None)
                del self._scaled[scaled.key]

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """Take versions to zero now; the next request for one starts it again."""
        for key in keys:
            self._retire(self._ensure(key))

    def resume(self, keys: tuple[VersionKey, ...]) -> None:
        """A minimum was set after a stop: it holds again, though nobody has asked."""
        for key in keys:
            self._ensure(key).resume()

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """All that is a setting holds here."""

    async def run(self) -> None:
        """Tick for ever, on a fixed beat; a beat that was missed is not made up for."""
        due_us = self._clock.monotonic_us()
        while True:
            self.tick()
            due_us = max(due_us + int(TICK_S * _US), self._clock.monotonic_us())
            await self._clock.sleep((due_us - self._clock.monotonic_us()) / _US)

    # -- what the actuator tells --

    def ready(self, replica: Replica) -> None:
        """Whoever asked is served."""
        if replica.key is not None:
            self._ensure(replica.key).asked_us = None

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """Not again before somebody asks, whatever the reason was."""
        scaled = self._ensure(key)
        scaled.asked_us = None
        scaled.start_failed(self._now_s(), at_zero=self._actuator.live(key) == 0)

    def lost(self, replica: Replica) -> None:
        """Make up for a replica that died; give its slot to whoever waits for one."""
        if replica.key is not None and (scaled := self._scaled.get(replica.key)) is not None:
            scaled.process_died(self._now_s(), served=replica.state is ReplicaState.READY)
            if replica.state is ReplicaState.READY:
                self._look(scaled)
        self.room()

    def room(self) -> None:
        """A slot may have come free: it goes to whoever has waited for one for longest."""
        for key in tuple(self._awaiting_room):
            if not self._actuator.has_room():
                break
            del self._awaiting_room[key]
            self._look(self._ensure(key))

    def check_integrity(self) -> None:
        """Assert that every version's windows add up, and that who waits for room is known."""
        for scaled in self._scaled.values():
            scaled.check_integrity()
        assert set(self._awaiting_room) <= set(self._scaled)
        assert set(self._short) <= set(self._scaled)

    # -- deciding --

    def _look(self, scaled: Scaled) -> None:
        found, key = self._versions.find(scaled.key), scaled.key
        now_us = self._clock.monotonic_us()
        if found is None:
            self._short.pop(key, None)
            self._actuator.apply(key, 0, now_us)
            return
        live, now = self._actuator.live(key), now_us / _US
        ready = self._actuator.ready(key)
        want = scaled.decide(*found, ready=ready, live=live, steps=lambda: self._economy.steps(*found), now=now)
        if isinstance(want, Level):
            self._awaiting_room.pop(key, None)  # who asked has gone
            self._short.pop(key, None)
            self._actuator.sleep(key, want)
            return
        if want is None:
            return
        self._short.pop(key, None)
        if want > live and not scaled.may_start(now, least=found[0].scale.min):
            self._look_later(scaled, now)
            want = live
        if want > live == 0 and not self._actuator.has_room() and self._makes_room(key, now):
            if key not in self._awaiting_room:
                self.on_placing(key)
            self._awaiting_room[key] = None
            self._short[key] = want
            return
        self._awaiting_room.pop(key, None)
        self._actuator.apply(key, want, now_us if scaled.asked_us is None else scaled.asked_us)
        if (short := want - self._actuator.live(key)) > 0:
            self._short[key] = short

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

    def _makes_room(self, key: VersionKey, now: float) -> bool:
        """Whether a slot will come free for `key`: one is leaving already, or an idle version is sent away for it."""
        others = len(self._awaiting_room) - (key in self._awaiting_room)
        if self._actuator.leaving() > others:
            return True
        # Of those alone that serve: thousands may want a slot at once, and each comes by here.
        holders = (
            Holder(
                scaled.key,
                ready,
                self._actuator.live(scaled.key),
                found[0].scale.min if (found := self._versions.find(scaled.key)) is not None else 0,
                scaled.asked_s,
            )
            for each in self._actuator.in_use()
            if (scaled := self._scaled.get(each)) is not None and (ready := self._actuator.ready(each))
        )
        victim = choose(holders, now)
        if victim is None:
            return False
        self._retire(self._scaled[victim])
        return True

    def _retire(self, scaled: Scaled) -> None:
        self._awaiting_room.pop(scaled.key, None)
        self._short.pop(scaled.key, None)
        scaled.stop(self._now_s())
        self._actuator.apply(scaled.key, 0, self._clock.monotonic_us())

    def _ensure(self, key: VersionKey) -> Scaled:
        scaled = self._scaled.get(key)
        if scaled is None:
            found = self._versions.find(key)
            window_s = found[0].scale.window_s if found is not None else 60.0
            scaled = self._scaled[key] = Scaled(key, window_s, self._actuator.ready(key), self._now_s())
        return scaled

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / _US
