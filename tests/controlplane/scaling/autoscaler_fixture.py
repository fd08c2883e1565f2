"""An autoscaler on virtual time with a fake actuator. The autoscaler tests use it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.kpa.autoscaler import Autoscaler
from controlplane.scaling.policy.breakeven import Level, LevelChange
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.replicas import Replica
from controlplane.tasks import Tasks
from kelvin.contracts.artifact_errors import ChunkCorrupt
from tests.controlplane.builders import TENANT, digest, registration, stats
from tests.controlplane.virtual_time import VirtualClock

FAST = ScaleSettings(window_s=6.0, grace_s=2.0)


class FakeVersions:
    """Stand-in for the registry: the part of it that the autoscaler calls."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Model] = {}

    def add(self, model: str, scale: ScaleSettings, max_streams: int = 64, tenant: str = TENANT) -> VersionKey:
        version = Version(registration(model, tenant=tenant, max_streams=max_streams), 0, VersionState.READY)
        self.known[tenant, model] = Model(tenant, model, 0, scale, {"prod": digest("a")}, (version,))
        return version.key

    def find(self, which: VersionKey) -> tuple[Model, Version] | None:
        model = self.known.get((which.tenant, which.model))
        version = None if model is None else model.version(which.version)
        return None if model is None or version is None else (model, version)

    def all_models(self) -> tuple[Model, ...]:
        return tuple(self.known.values())

    async def resume(self, which: VersionKey, stopped_at_s: int) -> None:
        self.set_stopped(which, None)

    def set_stopped(self, which: VersionKey, at_s: int | None) -> None:
        """Set the stop as the registry does when an operator stops the version, or None when a request resumes it."""
        model = self.known[which.tenant, which.model]
        versions = (replace(each, stopped_at_s=at_s) if each.key == which else each for each in model.versions)
        self.known[which.tenant, which.model] = replace(model, versions=tuple(versions))

    def set_scale(self, which: VersionKey, scale: ScaleSettings) -> None:
        """Set the scale as the registry does when an operator changes it."""
        name = which.tenant, which.model
        self.known[name] = replace(self.known[name], scale=scale)

    def deploy(self, model: str, letter: str) -> VersionKey:
        """Point the alias `prod` to this version. A new version is registered first."""
        known = self.known[TENANT, model]
        version = known.version(digest(letter)) or Version(registration(model, letter), 0, VersionState.READY)
        versions = tuple(dict.fromkeys((*known.versions, version)))
        self.known[TENANT, model] = replace(known, aliases={"prod": digest(letter)}, versions=versions)
        return version.key


class FixedLevelPlan:
    """Stand-in for WarmthCost: the same idle levels for every version."""

    def __init__(self) -> None:
        self.levels: tuple[LevelChange, ...] = (
            LevelChange(Level.WARM, 0.0),
            LevelChange(Level.ASLEEP, 20.0),
            LevelChange(Level.ZERO, 300.0),
        )

    def steps(self, model: Model, version: Version) -> tuple[LevelChange, ...]:
        return self.levels


class FakeActuator:
    """Imitates LocalActuator. A start counts once it is accepted, a slot is held until the process dies, a drain takes
    time.
    """

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.starting: dict[VersionKey, int] = {}
        self.serving: dict[VersionKey, int] = {}
        self.draining: dict[VersionKey, int] = {}
        self.asleep: set[VersionKey] = set()
        self.without_weights: set[VersionKey] = set()  # subset of asleep: at sleep level 2
        self.woken_versions: list[VersionKey] = []
        self.starts: list[tuple[VersionKey, int]] = []  # with the time of the request
        self.refused: list[VersionKey] = []
        self.listener: Autoscaler | None = None

    def apply(self, which: VersionKey, replicas: int, requested_us: int) -> None:
        for _ in range(replicas - self.live_count(which)):
            if not self.has_room():
                self.refused.append(which)
                return
            if which in self.asleep:
                self.asleep.discard(which)
                self.without_weights.discard(which)
                self.woken_versions.append(which)
            self.starting[which] = self.starting.get(which, 0) + 1
            self.starts.append((which, requested_us))
        for _ in range(self.live_count(which) - replicas):
            if self.starting.get(which):
                self.starting[which] -= 1
            else:
                self.serving[which] -= 1
                self.draining[which] = self.draining.get(which, 0) + 1

        if replicas == 0:
            self.asleep.discard(which)
            self.without_weights.discard(which)

    def sleep(self, which: VersionKey, level: Level) -> None:
        if self.live_count(which) == self.ready_count(which) == 1:
            self.serving[which] -= 1
            self.asleep.add(which)
        elif which in self.asleep and level is Level.DEEP_SLEEP:
            self.without_weights.add(which)

    def ready_count(self, which: VersionKey) -> int:
        return self.serving.get(which, 0)

    def live_count(self, which: VersionKey) -> int:
        return self.ready_count(which) + self.starting.get(which, 0)

    def started_count(self, which: VersionKey) -> int:
        return self.live_count(which)

    def process_count(self, which: VersionKey) -> int:
        return self.live_count(which) + self.draining.get(which, 0) + (which in self.asleep)

    def active_versions(self) -> tuple[VersionKey, ...]:
        known = {**self.starting, **self.serving, **self.draining, **dict.fromkeys(self.asleep, 1)}
        return tuple(each for each in known if self.process_count(each))

    def has_room(self) -> bool:
        return sum(self.process_count(each) - (each in self.asleep) for each in self.active_versions()) < self.slots

    def leaving_count(self) -> int:
        return sum(self.draining.values())

    # -- events from outside the autoscaler --

    def become_ready(self, which: VersionKey) -> None:
        self.starting[which] -= 1
        self.serving[which] = self.serving.get(which, 0) + 1
        self._get_listener().on_replica_ready(Replica("r", ReplicaState.READY, 0, key=which))

    def fail(self, which: VersionKey) -> None:
        self.starting[which] -= 1
        self._get_listener().on_start_failed(which, ChunkCorrupt("c", "nvme"))

    def die(self, which: VersionKey) -> None:
        self.serving[which] -= 1
        self._get_listener().on_replica_lost(Replica("r", ReplicaState.READY, 0, key=which))

    def drained(self, which: VersionKey) -> None:
        self.draining[which] -= 1
        self._get_listener().on_replica_lost(Replica("r", ReplicaState.ENDING, 0, key=which))

    def _get_listener(self) -> Autoscaler:
        assert self.listener is not None
        return self.listener


@dataclass
class AutoscalerScenario:
    """The autoscaler, its fakes and its clock."""

    catalogue: FakeVersions
    actuator: FakeActuator
    clock: VirtualClock
    scaler: Autoscaler
    plans: FixedLevelPlan
    feed: FeedHub
    tasks: Tasks

    def report(self, which: VersionKey, concurrency: float = 1.0, requests: int = 1) -> None:
        self.scaler.observe(stats(which, concurrency, requests))

    async def pass_seconds(self, count: int, which: VersionKey | None = None, concurrency: float = 0.0) -> None:
        """Advance the clock by `count` seconds, with one report of `which` per second."""
        for _ in range(count):
            if which is not None:
                self.report(which, concurrency, requests=0)
            await self.clock.advance(1.0)
            self.scaler.check_integrity()


@asynccontextmanager
async def running_autoscaler(slots: int = 8, *, started_ago_s: float = 60.5) -> AsyncIterator[AutoscalerScenario]:
    """Yield an autoscaler that started `started_ago_s` seconds ago."""
    catalogue, actuator, clock, plans = FakeVersions(), FakeActuator(slots), VirtualClock(), FixedLevelPlan()
    feed = FeedHub()
    async with Tasks() as tasks:
        scaler = Autoscaler(catalogue, actuator, clock, tasks, plans.steps, feed)
        actuator.listener = scaler
        tasks.start(scaler.run(), "autoscaler")
        await clock.advance(started_ago_s)
        yield AutoscalerScenario(catalogue, actuator, clock, scaler, plans, feed, tasks)


async def wake_version(w: AutoscalerScenario, which: VersionKey) -> None:
    w.report(which)
    w.actuator.become_ready(which)


def replace_scale(scale: ScaleSettings, **given: float | str) -> ScaleSettings:
    return msgspec.structs.replace(scale, **given)
