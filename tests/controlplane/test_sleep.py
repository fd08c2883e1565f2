"""Replicas that sleep, over real sockets and processes: the slot is free, the version is kept, a caller wakes it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from contracts.problem import code_of
from contracts.timeline import Stage
from controlplane.facts import VersionKey
from controlplane.policy.replica_life import ReplicaState
from tests.controlplane.builders import key
from tests.controlplane.ground import Local, Run, eventually, fake_zygote, local


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    where = Run(tmp_path / "run")
    with fake_zygote(where):
        yield where


def play(run: Run, scenario: Callable[[Local], Awaitable[None]], **settings: object) -> None:
    """A scenario over a fresh actuator; whatever it leaves is consistent."""

    async def main() -> None:
        async with local(run, **settings) as it:  # type: ignore[arg-type]
            await scenario(it)
            it.check_integrity()

    asyncio.run(main())


async def asleep(it: Local, which: VersionKey) -> None:
    """Start it, and have it asleep."""
    it.apply(which, 1)
    await it.ready(which)
    it.actuator.sleep(which)
    await eventually(lambda: len(it.table.sleepers(which)) == 1, f"{which} sleeps")
    it.check_integrity()


def test_a_sleeper_gives_its_slot_back_and_wakes_for_a_caller(run: Run) -> None:
    """With one slot: another version runs meanwhile; then the first wakes, in the same process, and is in the feed."""

    async def scenario(it: Local) -> None:
        rooms: list[int] = []
        it.actuator.on_room(lambda: rooms.append(it.table.held))
        await asleep(it, key())
        assert rooms == [0]
        assert (it.table.held, it.table.live(key()), it.table.leaving()) == (0, 0, 0)
        assert it.feed.snapshot().replicas == ()
        (sleeper,) = it.table.of(key())
        it.apply(key("n"), 1)
        await it.ready(key("n"))
        it.apply(key("n"), 0)
        await eventually(lambda: it.table.held == 0)
        asked_us = it.apply(key(), 1)
        await it.ready(key())
        (row,) = it.feed.snapshot().replicas
        assert (row.runtime_id, row.draining) == (sleeper.runtime_id, False)
        assert [span.stage for span in row.restore] == [Stage.DECIDED, Stage.PROMOTED, Stage.READY]
        ((_, woken_us),) = run.calls("wake:m")
        assert 0 <= row.restore[1].after_us <= woken_us - asked_us
        assert len(run.calls("bind:m")) == 1
        assert it.table.held == 1
        it.actuator.sleep(key())
        await eventually(lambda: len(it.table.sleepers()) == 1, "it sleeps again")

    play(run, scenario, slots=1)


def test_a_wake_is_a_start_and_needs_a_slot(run: Run) -> None:
    """However many ask; where the slot is another's, callers are told."""

    async def scenario(it: Local) -> None:
        await asleep(it, key())
        it.apply(key("n"), 1)
        it.apply(key(), 1)
        assert [code_of(failure) for _, failure in it.news.failures] == ["overloaded"]
        await it.ready(key("n"))
        it.apply(key("n"), 0)
        await eventually(lambda: it.table.held == 0)
        for _ in range(100):
            it.apply(key(), 1)
        await it.ready(key())
        assert len(run.calls("wake:m")) == 1

    play(run, scenario, slots=1)


def test_without_giving_the_slot_back_the_test_above_goes_red(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where a sleeper counts as one that holds a slot, nothing else can run."""

    async def scenario(it: Local) -> None:
        await asleep(it, key())
        monkeypatch.setattr(type(it.table), "held", property(lambda table: len(table.of(key()))))
        it.apply(key("n"), 1)
        assert [code_of(failure) for _, failure in it.news.failures] == ["overloaded"]
        monkeypatch.undo()

    play(run, scenario, slots=1)


def test_who_is_asked_for_while_it_falls_asleep_wakes_as_soon_as_it_sleeps(run: Run) -> None:
    """One process throughout, no second start, and the slot is never another's."""

    async def scenario(it: Local) -> None:
        it.apply(key(), 1)
        await it.ready(key())
        run.tell("restless")
        it.actuator.sleep(key())
        await eventually(lambda: len(run.calls("sleep")) == 1)
        it.apply(key(), 1)
        it.apply(key(), 1)
        assert (it.table.live(key()), it.table.held) == (1, 1)
        (run.path / "restless").unlink()
        await it.ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (1, 1)
        (row,) = it.feed.snapshot().replicas
        assert not row.draining

    play(run, scenario, slots=1)


def test_who_is_busy_serves_on(run: Run) -> None:
    """It is in the feed as before."""

    async def scenario(it: Local) -> None:
        it.apply(key("busy"), 1)
        await it.ready(key("busy"))
        it.actuator.sleep(key("busy"))
        await eventually(lambda: len(run.calls("sleep")) == 1)
        await it.ready(key("busy"))
        (row,) = it.feed.snapshot().replicas
        assert not row.draining
        run.tell("idle")

    play(run, scenario)


def test_zero_ends_a_sleeper(run: Run) -> None:
    """And one that is falling asleep."""

    async def scenario(it: Local) -> None:
        await asleep(it, key())
        it.apply(key(), 0)
        await eventually(lambda: not it.table.of(key()))
        it.apply(key(), 1)
        await it.ready(key())
        run.tell("restless")
        it.actuator.sleep(key())
        it.apply(key(), 0)
        (run.path / "restless").unlink()
        await eventually(lambda: not it.table.of(key()))
        assert it.table.held == 0

    play(run, scenario)


def test_a_sleeper_that_dies_is_started_anew(run: Run) -> None:
    """Nobody misses it until somebody asks."""

    async def scenario(it: Local) -> None:
        await asleep(it, key())
        (sleeper,) = it.table.sleepers()
        os.kill(sleeper.pid, signal.SIGKILL)
        await eventually(lambda: not it.table.of(key()))
        it.apply(key(), 1)
        await it.ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (0, 2)

    play(run, scenario)


def test_a_wake_that_fails_is_told_and_leaves_nothing(run: Run) -> None:
    """Under its own code; its process is dead, its slot free."""

    async def scenario(it: Local) -> None:
        await asleep(it, key())
        run.tell("nightmare")
        it.apply(key(), 1)
        await eventually(lambda: len(it.news.failures) == 1)
        assert code_of(it.news.failures[0][1]) == "chunk_corrupt"
        await eventually(lambda: it.table.held == 0)
        await eventually(lambda: not it.table.of(key()))

    play(run, scenario)


def test_a_restarted_control_plane_finds_its_sleepers(run: Run) -> None:
    """It sleeps on, and wakes for the next caller; one of a version that is gone by now ends."""

    async def first(it: Local) -> None:
        await asleep(it, key())

    async def second(it: Local) -> None:
        (sleeper,) = it.table.of(key())
        assert (sleeper.state, it.table.held) == (ReplicaState.ASLEEP, 0)
        it.apply(key(), 1)
        await it.ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (1, 1)
        it.actuator.sleep(key())
        await eventually(lambda: len(it.table.sleepers()) == 1)

    async def third(it: Local) -> None:
        await eventually(lambda: not it.table.of(key()))

    play(run, first)
    play(run, second)
    play(run, third, known=lambda _: False)


def test_memory_that_sleepers_keep_goes_to_whoever_is_asked_for(run: Run) -> None:
    """The one that has slept for longest first, one at a time, and no more than it takes."""

    async def scenario(it: Local) -> None:
        for name in ("a", "b", "c"):
            await asleep(it, key(name))
        run.tell("crowded")
        it.apply(key("full"), 1)
        await eventually(lambda: not it.table.of(key("a")))
        (run.path / "crowded").unlink()
        await it.ready(key("full"))
        assert [len(it.table.sleepers(key(name))) for name in ("a", "c")] == [0, 1]
        assert it.news.failures == []

    play(run, scenario)


def test_without_a_sleeper_who_finds_no_memory_is_told(run: Run) -> None:
    """Control of the test above: nothing gives way, so the failure is the callers'."""

    async def scenario(it: Local) -> None:
        run.tell("crowded")
        it.apply(key("full"), 1)
        await eventually(lambda: len(it.news.failures) == 1)
        assert code_of(it.news.failures[0][1]) == "overloaded"

    play(run, scenario)
