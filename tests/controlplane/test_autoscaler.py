"""The loop from reports to replicas, over virtual time: wake, hold, scale out, idle, fail, recover, stop, make room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from contracts.errors import ChunkCorrupt, Failure
from controlplane.autoscaler import Autoscaler
from controlplane.facts import Model, ScaleSettings, Version, VersionKey
from controlplane.policy.lifecycle import VersionState
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica
from controlplane.tasks import Tasks
from tests.controlplane.builders import TENANT, digest, key, registration, stats
from tests.controlplane.virtual_time import VirtualClock

FAST = ScaleSettings(window_s=6.0, grace_s=2.0)


class Catalogue:
    """What the registry answers from memory."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Model] = {}

    def add(self, model: str, scale: ScaleSettings, max_streams: int = 64) -> VersionKey:
        version = Version(registration(model, max_streams=max_streams), 0, VersionState.READY)
        self.known[TENANT, model] = Model(TENANT, model, 0, scale, {"prod": digest("a")}, (version,))
        return version.key

    def rescale(self, model: str, scale: ScaleSettings) -> None:
        self.known[TENANT, model] = replace(self.known[TENANT, model], scale=scale)

    def find(self, which: VersionKey) -> tuple[Model, Version] | None:
        model = self.known.get((which.tenant, which.model))
        version = None if model is None else model.version(which.version)
        return None if model is None or version is None else (model, version)

    def every_model(self) -> tuple[Model, ...]:
        return tuple(self.known.values())


class FakeActuator:
    """Imitates LocalActuator: a start counts from its acceptance, a slot is held until death, a drain takes time."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = slots
        self.starting: dict[VersionKey, int] = {}
        self.serving: dict[VersionKey, int] = {}
        self.draining: dict[VersionKey, int] = {}
        self.starts: list[tuple[VersionKey, int]] = []  # with the time that it was asked for
        self.refused: list[VersionKey] = []
        self.listener: Autoscaler | None = None

    def apply(self, which: VersionKey, replicas: int, asked_us: int) -> None:
        for _ in range(replicas - self.live(which)):
            if not self.has_room():
                self.refused.append(which)
                self._tell().failed(which, Failure())
                return
            self.starting[which] = self.starting.get(which, 0) + 1
            self.starts.append((which, asked_us))
        for _ in range(self.live(which) - replicas):
            if self.starting.get(which):
                self.starting[which] -= 1
            else:
                self.serving[which] -= 1
                self.draining[which] = self.draining.get(which, 0) + 1

    def ready(self, which: VersionKey) -> int:
        return self.serving.get(which, 0)

    def live(self, which: VersionKey) -> int:
        return self.ready(which) + self.starting.get(which, 0)

    def present(self, which: VersionKey) -> int:
        return self.live(which) + self.draining.get(which, 0)

    def in_use(self) -> tuple[VersionKey, ...]:
        return tuple(each for each in {**self.starting, **self.serving, **self.draining} if self.present(each))

    def has_room(self) -> bool:
        return sum(self.present(each) for each in self.in_use()) < self.slots

    def leaving(self) -> int:
        return sum(self.draining.values())

    # -- what the outside does --

    def become_ready(self, which: VersionKey) -> None:
        self.starting[which] -= 1
        self.serving[which] = self.serving.get(which, 0) + 1
        self._tell().ready(Replica("r", ReplicaState.READY, 0, key=which))

    def fail(self, which: VersionKey) -> None:
        self.starting[which] -= 1
        self._tell().failed(which, ChunkCorrupt("c", "nvme"))

    def die(self, which: VersionKey) -> None:
        self.serving[which] -= 1
        self._tell().lost(Replica("r", ReplicaState.READY, 0, key=which))

    def drained(self, which: VersionKey) -> None:
        self.draining[which] -= 1
        self._tell().lost(Replica("r", ReplicaState.ENDING, 0, key=which))

    def _tell(self) -> Autoscaler:
        assert self.listener is not None
        return self.listener


@dataclass
class World:
    """Everything that a scenario touches."""

    catalogue: Catalogue
    actuator: FakeActuator
    clock: VirtualClock
    scaler: Autoscaler

    def report(self, which: VersionKey, concurrency: float = 1.0, requests: int = 1) -> None:
        self.scaler.observe(stats(which, concurrency, requests))

    async def seconds(self, count: int, which: VersionKey | None = None, concurrency: float = 0.0) -> None:
        """Let seconds pass, each with a report of `which`."""
        for _ in range(count):
            if which is not None:
                self.report(which, concurrency, requests=0)
            await self.clock.advance(1.0)
            self.scaler.check_integrity()


@asynccontextmanager
async def world(slots: int = 8) -> AsyncIterator[World]:
    catalogue, actuator, clock = Catalogue(), FakeActuator(slots), VirtualClock()
    async with Tasks() as tasks:
        scaler = Autoscaler(catalogue, actuator, clock, tasks)
        actuator.listener = scaler
        tasks.start(scaler.run(), "autoscaler")
        await clock.advance(0.5)
        yield World(catalogue, actuator, clock, scaler)


async def woken(w: World, which: VersionKey) -> None:
    w.report(which)
    w.actuator.become_ready(which)


def test_a_poke_is_decided_on_at_once() -> None:
    """A version at zero starts before the report is answered, with the caller's time as the zero of its spans."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            now_us = w.clock.monotonic_us()
            w.report(which)
            assert w.actuator.starts == [(which, now_us)]

    asyncio.run(main())


@pytest.mark.parametrize("concurrency", [1.0, 40.0])
def test_a_thousand_pokes_make_one_start(concurrency: float) -> None:
    """At max 1 nobody's poke starts a second replica, however many wait and however long the start takes."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            for _ in range(1000):
                w.report(which, concurrency)
            await w.seconds(30, which, 200.0)
            assert len(w.actuator.starts) == 1

    asyncio.run(main())


def test_without_counting_starts_a_thousand_pokes_make_many() -> None:
    """Negative control: an actuator whose starts do not count as replicas starts one at each poke."""

    async def main() -> None:
        async with world(slots=10_000) as w:
            which = w.catalogue.add("m", FAST)
            w.actuator.live = lambda which: 0  # type: ignore[method-assign]
            for _ in range(1000):
                w.report(which)
            assert len(w.actuator.starts) > 900

    asyncio.run(main())


def test_load_scales_out_to_its_need_and_the_maximum() -> None:
    """Ten streams a replica at 70 %: thirty-five callers need five, a maximum of three gives three."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", replace_scale(FAST, max=8), max_streams=10)
            capped = w.catalogue.add("n", replace_scale(FAST, max=3), max_streams=10)
            for each in (which, capped):
                await woken(w, each)
            for _ in range(6):
                w.report(which, 35.0, 0)
                w.report(capped, 35.0, 0)
                await w.clock.advance(1.0)
            assert w.actuator.live(which) == 5
            assert w.actuator.live(capped) == 3

    asyncio.run(main())


def replace_scale(scale: ScaleSettings, **given: float) -> ScaleSettings:
    return ScaleSettings(**{name: getattr(scale, name) for name in scale.__struct_fields__} | given)


def test_idle_goes_to_zero_after_window_and_grace_and_not_before() -> None:
    """Silence through the stable window, then the grace; one request anywhere in between keeps the replica."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", replace_scale(FAST, window_s=6.0, grace_s=10.0))
            await woken(w, which)
            await w.seconds(5, which, 1.0)
            await w.seconds(12)
            assert w.actuator.ready(which) == 1, "window over, grace not"
            w.report(which)
            await w.seconds(14)
            assert w.actuator.ready(which) == 1, "the request began it anew"
            await w.seconds(16)
            assert w.actuator.live(which) == 0
            assert len(w.actuator.starts) == 1

    asyncio.run(main())


def test_a_version_under_load_is_never_taken_down() -> None:
    """Ten minutes of steady load: one replica throughout."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            await woken(w, which)
            for _ in range(600):
                await w.seconds(1, which, 1.0)
                assert w.actuator.live(which) == 1

    asyncio.run(main())


def test_a_start_is_not_given_up_when_its_caller_leaves() -> None:
    """The bytes are on their way; the replica that comes serves the next caller, and leaves by being idle."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            w.report(which)
            await w.seconds(60)
            assert w.actuator.live(which) == 1
            w.actuator.become_ready(which)
            await w.seconds(12)
            assert w.actuator.live(which) == 0

    asyncio.run(main())


def test_after_a_failure_the_next_poke_starts_and_not_sooner_than_a_second() -> None:
    """Ticks never retry by themselves; a poke within the second is remembered and acted on when it is over."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            w.report(which)
            w.actuator.fail(which)
            await w.seconds(30)
            assert len(w.actuator.starts) == 1, "nobody asked"
            w.report(which)
            assert len(w.actuator.starts) == 2
            w.actuator.fail(which)
            await w.clock.advance(0.3)
            asked_us = w.clock.monotonic_us()
            for _ in range(100):
                w.report(which)
            assert len(w.actuator.starts) == 2, "too soon"
            await w.clock.advance(0.69)
            assert len(w.actuator.starts) == 2
            await w.clock.advance(0.02)
            assert w.actuator.starts[2:] == [(which, asked_us)]

    asyncio.run(main())


def test_a_minimum_is_kept_and_tried_again() -> None:
    """Replicas of a version with a minimum are there without traffic, also after one died or failed to start."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", replace_scale(FAST, min=2, max=2))
            await w.seconds(3)
            assert w.actuator.live(which) == 2
            w.actuator.become_ready(which)
            w.actuator.become_ready(which)
            await w.seconds(120)
            assert w.actuator.ready(which) == 2
            w.actuator.die(which)
            assert w.actuator.live(which) == 2, "made up for at once"
            w.actuator.become_ready(which)
            w.actuator.die(which)
            w.actuator.die(which)
            w.actuator.fail(which) if w.actuator.starting.get(which) else None
            await w.seconds(40)
            assert w.actuator.live(which) == 2

    asyncio.run(main())


def test_deaths_in_a_row_are_made_up_for_once_a_second() -> None:
    """A version whose replicas die as they come does not make the machine spin."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            await woken(w, which)
            began = len(w.actuator.starts)
            w.report(which)
            w.actuator.die(which)
            for _ in range(100):
                w.report(which, 1.0, 0)
                if w.actuator.starting.get(which):
                    w.actuator.become_ready(which)
                    w.actuator.die(which)
                await w.clock.advance(0.1)
            assert 8 <= len(w.actuator.starts) - began <= 13

    asyncio.run(main())


def test_stop_means_zero_now_and_a_new_request_wakes() -> None:
    """What was under way may finish without waking anything; an announcement of a new request wakes at once."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", replace_scale(FAST, min=1))
            await w.seconds(3)
            w.actuator.become_ready(which)
            w.report(which, 3.0, 3)
            w.scaler.stop((which,))
            assert w.actuator.live(which) == 0
            w.report(which, 2.7, 2)  # of the second in which it was stopped
            assert w.actuator.live(which) == 0
            w.actuator.drained(which)
            await w.clock.advance(0.1)
            w.report(which, 1.0, 1)
            assert w.actuator.live(which) == 1

    asyncio.run(main())


def test_streams_that_finish_after_a_stop_wake_nothing() -> None:
    """A minute of reports of streams that began before the stop: the version stays at zero."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            await woken(w, which)
            await w.seconds(5, which, 2.0)
            w.scaler.stop((which,))
            await w.seconds(60, which, 2.0)
            assert w.actuator.live(which) == 0
            w.actuator.drained(which)
            w.report(which, 0.4, 0)  # the rest of the last second
            await w.seconds(30)
            assert w.actuator.live(which) == 0

    asyncio.run(main())


def test_a_caller_who_came_unannounced_after_a_stop_is_served_in_the_end() -> None:
    """A report that may be old is doubted, not lost: the next one wakes."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", FAST)
            await woken(w, which)
            w.scaler.stop((which,))
            w.report(which, 0.7, 2)
            assert w.actuator.live(which) == 0
            await w.seconds(3, which, 1.0)
            assert w.actuator.live(which) == 1

    asyncio.run(main())


def test_a_full_machine_sends_the_longest_idle_version_away() -> None:
    """Two slots, two idle versions, a third is asked for: the longest idle makes room, and is not asked back."""

    async def main() -> None:
        async with world(slots=2) as w:
            first, second, third = (w.catalogue.add(name, replace_scale(FAST, grace_s=600.0)) for name in "abc")
            await woken(w, first)
            await w.seconds(2)
            await woken(w, second)
            await w.seconds(5)
            asked_us = w.clock.monotonic_us()
            w.report(third)
            await w.seconds(3, third, 1.0)
            assert (w.actuator.live(first), w.actuator.live(second)) == (0, 1)
            assert w.actuator.live(third) == 0, "the slot is held until the process is dead"
            w.actuator.drained(first)
            assert w.actuator.starts[2:] == [(third, asked_us)]
            await w.seconds(20, third, 1.0)
            assert w.actuator.refused == []
            assert w.actuator.live(first) == 0

    asyncio.run(main())


def test_a_full_machine_of_busy_versions_says_so() -> None:
    """Nobody busy is sent away; the caller is refused at once and may come again."""

    async def main() -> None:
        async with world(slots=1) as w:
            busy, other = w.catalogue.add("a", FAST), w.catalogue.add("b", FAST)
            await woken(w, busy)
            w.report(other)
            assert w.actuator.refused == [other]
            assert w.actuator.live(busy) == 1

    asyncio.run(main())


def test_only_what_is_used_costs_anything() -> None:
    """Ten thousand models at zero are not looked at; one that went to zero is forgotten."""

    async def main() -> None:
        async with world() as w:
            for number in range(10_000):
                w.catalogue.add(f"m{number}", FAST)
            which = key("m7")
            await woken(w, which)
            await w.seconds(30)
            assert w.actuator.live(which) == 0
            w.actuator.drained(which)
            await w.seconds(10)
            assert len(w.scaler._scaled) == 0

    asyncio.run(main())


def test_an_unknown_version_is_ignored() -> None:
    """A report about what does not exist starts nothing and leaves nothing behind."""

    async def main() -> None:
        async with world() as w:
            w.report(key("nobody"))
            assert w.actuator.starts == []
            assert len(w.scaler._scaled) == 0

    asyncio.run(main())


def test_adopted_replicas_are_held_and_then_judged_by_traffic() -> None:
    """A restart has no metrics: what serves goes on serving for the window, then idle ones go."""

    async def main() -> None:
        async with world() as w:
            which = w.catalogue.add("m", replace_scale(FAST, max=4))
            w.actuator.serving[which] = 3
            await w.seconds(5)
            assert w.actuator.ready(which) == 3
            await w.seconds(40)
            assert w.actuator.ready(which) == 0

    asyncio.run(main())


def test_a_defect_in_one_version_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on, and says what happened."""

    async def main() -> None:
        async with world() as w:
            bad, good = w.catalogue.add("a", replace_scale(FAST, min=1)), w.catalogue.add("b", FAST)
            apply = w.actuator.apply

            def broken(which: VersionKey, replicas: int, asked_us: int) -> None:
                if which == bad:
                    raise RuntimeError("defect")
                apply(which, replicas, asked_us)

            w.actuator.apply = broken  # type: ignore[method-assign]
            await woken(w, good)
            await w.seconds(12)
            assert w.actuator.live(good) == 0

    asyncio.run(main())
    assert "a version could not be looked at" in caplog.text
