"""Play histories, search for one that breaks an invariant, and shrink it."""

import asyncio
import gc
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tests.simulation.core.determinism import deterministic
from tests.simulation.core.history import History, Step, draw_history
from tests.simulation.core.simulation_loop import NoProgress, SimulationLoop, describe
from tests.simulation.core.world import InvariantBroken, World, recording_logged_errors

MEMORY: Final = Path("/dev/shm")  # files here cost no disk writes
LONGEST_S: Final = 100_000.0  # virtual seconds of a history
COLLECT_EACH: Final = 10  # histories
SHRINK_PLAYS: Final = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a history. `broken` is None if all invariants held."""

    history: History
    broken: InvariantBroken | None
    trace: tuple[str, ...]

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.history}\nholds"
        return f"{self.broken}\n--- history\n{self.history}\n--- trace\n" + "\n".join(self.trace)


def play(world_type: type[World], history: History) -> Outcome:
    """Play a history from a fresh world to its end."""
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    trace: list[str] = []
    try:
        with asyncio.Runner(loop_factory=SimulationLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, SimulationLoop)
            with deterministic(history.seed, loop) as clocks, recording_logged_errors(loop):
                world = world_type(Random(f"world {history.seed}"), directory, loop, clocks)
                trace = world.trace
                runner.run(_play(world, history))
    except InvariantBroken as broken:
        return Outcome(history, broken, tuple(trace))
    except NoProgress as error:
        return Outcome(history, InvariantBroken("time_passes", str(error)), tuple(trace))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Outcome(history, None, tuple(trace))


async def _play(world: World, history: History) -> None:
    await world.start()
    try:
        async with asyncio.timeout(LONGEST_S):
            for step in history.steps:
                await asyncio.sleep(step.after_ms / 1000)
                world.steps += 1
                world.record_event(f"step {step}")
                await _do(step.kind, getattr(world, step.kind)(Random(step.seed)))
                await world.rounds()
                world.check(world.always)
            world.record_event("calm")
            await _do("calm", world.quiesce())
            await world.rounds()
            world.check((*world.always, *world.at_rest))
    except TimeoutError as error:
        raise InvariantBroken("a_history_ends", f"it goes on after {LONGEST_S:g} s") from error
    finally:
        await world.stop()
    world.check(())


async def _do(what: str, work: Awaitable[None]) -> None:
    try:
        await work
    except InvariantBroken:
        raise
    except Exception as error:
        raise InvariantBroken(what, describe(error, "raised")) from error


def draw_for(world_type: type[World], seed: int) -> History:
    """Draw the history of a seed."""
    return draw_history(world_type.name, world_type.operations, seed, world_type.steps_max)


def search_seeds(
    world_type: type[World], seeds: Iterable[int], seen: Callable[[Outcome], bool] = lambda outcome: False
) -> Outcome | None:
    """Play the history of each seed until one breaks an invariant. `seen` returns whether to continue anyway."""
    gc.collect()
    gc.freeze()
    gc.disable()  # a history ends before much of it would be collected
    try:
        for number, seed in enumerate(seeds):
            outcome = play(world_type, draw_for(world_type, seed))
            if outcome.broken is not None and not seen(outcome):
                return outcome
            if number % COLLECT_EACH == COLLECT_EACH - 1:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return None


def shrink_history(world_type: type[World], found: Outcome, plays_max: int = SHRINK_PLAYS) -> Outcome:
    """Drop as many steps as possible while the same invariant breaks (Zeller, "Isolating failure-inducing input")."""
    assert found.broken is not None
    best, plays = found, 0
    pieces = 2
    while len(best.history.steps) > 1 and plays < plays_max:
        steps, size = best.history.steps, max(1, len(best.history.steps) // pieces)
        for begin in range(0, len(steps), size):
            plays += 1
            outcome = play(world_type, best.history.with_steps(_without(steps, begin, size)))
            if outcome.broken is not None and outcome.broken.invariant == found.broken.invariant:
                best, pieces = outcome, max(2, pieces - 1)
                break
            if plays >= plays_max:
                break
        else:
            if size == 1:
                break
            pieces = min(len(steps), pieces * 2)
    return best


def _without(steps: tuple[Step, ...], begin: int, size: int) -> list[Step]:
    """Return the steps without `size` of them. Later steps keep their times."""
    left, lost_ms = [], 0
    for number, step in enumerate(steps):
        if begin <= number < begin + size:
            lost_ms += step.after_ms
        else:
            left.append(Step(step.after_ms + lost_ms, step.kind, step.seed))
            lost_ms = 0
    return left
