"""The simulation itself: seeds reproduce histories exactly, and failing histories shrink to the necessary steps."""

import asyncio
import os
import random
import subprocess
import sys
import time
from random import Random

import msgspec
import pytest

from tests.simulation.core.history import History, Step, draw_history
from tests.simulation.core.history_player import draw_for, play, search_seeds, shrink_history
from tests.simulation.core.world import World, operation
from tests.simulation.worlds import WORLDS

SEEDS = (3, 25, 38)


class _Counter(World):
    """A world that breaks after two pushes and one pull."""

    name = "counter"
    steps_max = 60

    async def start(self) -> None:
        self.pushed = self.pulled = 0

    @operation(1)
    async def push(self, random: Random) -> None:
        self.record_event(f"push {random.randrange(100)} at {time.monotonic():.3f}")
        self.pushed += 1

    @operation(1)
    async def pull(self, random: Random) -> None:
        self.pulled += 1

    @operation(3)
    async def idle(self, random: Random) -> None:
        await asyncio.to_thread(time.monotonic)

    async def quiesce(self) -> None:
        return

    async def stop(self) -> None:
        return


def few_are_pushed(world: _Counter) -> None:
    assert world.pushed < 2 or not world.pulled, "pushed twice, pulled once"


_Counter.always = (few_are_pushed,)


class _Careless(_Counter):
    """A world whose background task fails."""

    name = "careless"

    @operation(1)
    async def fail(self, random: Random) -> None:
        async def work() -> None:
            raise ValueError("unforeseen")

        self.task = asyncio.create_task(work(), name="background")


class _Ending(_Counter):
    """A world whose loop ends."""

    name = "ending"

    async def start(self) -> None:
        await super().start()
        self.start_loop(asyncio.sleep(1.0), "beat")


def test_failing_history_shrinks_to_the_steps_it_needs() -> None:
    """Three of up to sixty steps are left, at their original times."""
    found = search_seeds(_Counter, range(100))
    assert found is not None
    small = shrink_history(_Counter, found)
    assert sorted(step.kind for step in small.history.steps) == ["pull", "push", "push"]
    assert str(small.broken) == "few_are_pushed: pushed twice, pulled once"
    assert sum(step.after_ms for step in small.history.steps) <= sum(step.after_ms for step in found.history.steps)


def test_history_is_read_back_from_its_text() -> None:
    """A printed failure can be played again."""
    history = draw_history("counter", {"push": 1, "pull": 2}, 7, 40)
    assert History.parse(str(history)) == history


@pytest.fixture(scope="module")
def traces_of_another_process() -> dict[str, list[str]]:
    """Return the traces of SEEDS in each world, from another process with another hash seed."""
    command = [sys.executable, "-m", "tests.simulation.test_core"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    return msgspec.json.decode(done.stdout, type=dict[str, list[str]])


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_seed_plays_the_same_history(world: str, traces_of_another_process: dict[str, list[str]]) -> None:
    """Two plays in this process and one in another with another hash seed give the same trace, byte for byte."""
    here = _traces(world)
    assert here == _traces(world)
    assert here == traces_of_another_process[world]


def test_failed_task_is_reported() -> None:
    """A task whose exception is never retrieved breaks its history."""
    outcome = play(_Careless, History("careless", 1, (Step(0, "fail", 1),)))
    assert outcome.broken is not None
    assert outcome.broken.text == "task background: ValueError('unforeseen')"


def test_ended_loop_is_reported() -> None:
    outcome = play(_Ending, History("ending", 1, (Step(2000, "idle", 1),)))
    assert outcome.broken is not None
    assert outcome.broken.invariant == "no_loop_has_ended"


def test_clocks_and_chance_are_given_back() -> None:
    """After a history, the process has its own clocks and random state again."""
    before = time.monotonic, time.time, os.urandom, random.getstate()
    play(_Counter, draw_for(_Counter, 1))
    assert before == (time.monotonic, time.time, os.urandom, random.getstate())


def _traces(world: str) -> list[str]:
    outcomes = [play(WORLDS[world], draw_for(WORLDS[world], seed)) for seed in SEEDS]
    return ["\n".join((str(outcome.broken), *outcome.trace)) for outcome in outcomes]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode({world: _traces(world) for world in WORLDS}))
