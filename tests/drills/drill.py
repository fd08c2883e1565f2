"""One cell: bring an operation to its stage, kill, look at what its client got and at the bill; and what a group is."""

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import psutil

from coldstart_bench.endings import ANSWERED, Ending, Outcome
from coldstart_bench.installation import ended, stray_sockets, unfinished
from tests.drills import leftovers
from tests.drills.bill import reasons
from tests.drills.ground import AWAY, SETTLED_S, Ground, standing, wait
from tests.drills.matrix import Process, Stage, kill_expected
from tests.drills.models import TinyModels
from tests.drills.operations import NotSo
from tests.drills.stages import STAGES, Held

TRIES: Final = 4
ENDING: Final = (Process.SUPERVISOR, Process.EVERYTHING)  # whose death ends the installation
TROUBLE: Final = (NotSo, psutil.Error, *AWAY)


@dataclass(frozen=True, slots=True)
class Result:
    """Of a cell, or of the checks that end a group."""

    name: str
    seen: Outcome | None
    wrong: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        verdict, seen = "RED  " if self.wrong else "green", str(self.seen or "")
        return f"{verdict} {self.name:28} {seen:24} {self.seconds:5.1f} s  {'; '.join(self.wrong)}".rstrip()


def timed(name: str, work: Callable[[], tuple[Outcome | None, list[str]]]) -> Result:
    """What is not so is why a cell is red."""
    began = time.monotonic()
    try:
        seen, wrong = work()
    except TROUBLE as error:
        seen, wrong = None, [f"{type(error).__name__}: {error}"]
    return Result(name, seen, tuple(wrong), time.monotonic() - began)


def victims(ground: Ground, process: Process, held: Held | None) -> list[psutil.Process]:
    """Who is killed: one process, every standby, or every process that there is. Raises NotSo where nobody is there."""
    match process:
        case Process.CLIENT if held is not None:
            return [psutil.Process(held.operation.pid)]
        case Process.RUNTIME if held is not None and held.runtime is not None:
            return [held.runtime]
        case Process.EVERYTHING:
            return ground.everything()
        case Process.STANDBY:
            found = ground.standbys(held.runtime if held else None)
            if not found:
                raise NotSo("no standby is there to be killed")
            return found
        case _:
            return [ground.process(process)]


def kill_at(
    ground: Ground, models: TinyModels, process: Process, stage: Stage, expected: Outcome
) -> tuple[Outcome, list[str]]:
    """What the client saw, and what is wrong. A kill that missed its stage is no drill: it is tried again."""
    for _ in range(TRIES):
        ground.wait_until_whole()
        with STAGES[stage](ground, models) as held:
            dying = victims(ground, process, held) if held.is_there() else []
            ground.note_family()
            hit = bool(dying) and held.is_there()
            if hit:
                kill(dying)
            held.release()
            if hit and process in ENDING:
                ground.restart()
            seen = held.operation.outcome()
            endings = [*held.operation.endings(), *(held.beside.endings() if held.beside else ())]
            wrong = reasons(expected, seen) if hit else []
            ground.wait_until_whole()
            if seen != ANSWERED and held.again is not None:
                wrong += _once_more(held)
        ground.expect_answer()
        wrong += ground.settle(billed(process, endings))
        if hit or wrong:
            return seen, wrong
    raise NotSo(f"none of {TRIES} kills met its stage")


def billed(process: Process | None, endings: Iterable[Ending]) -> list[Ending]:
    """What the bill may have of them after that death."""
    return [replace(ending, unrecorded=process is Process.EVERYTHING) for ending in endings]


def kill(dying: Iterable[psutil.Process]) -> None:
    """All at once. One that ends by itself meanwhile is as good as killed."""
    for each in dying:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _once_more(held: Held) -> list[str]:
    assert held.again is not None
    again = held.again()
    try:
        return [] if (seen := again.outcome()) == ANSWERED else [f"the same again is {seen}"]
    finally:
        again.close()


def closing_checks(ground: Ground, shared: frozenset[str]) -> tuple[None, list[str]]:
    """Of a group: bill, ledger and store by their commands, then the end of the installation, and what is left."""
    ground.to_zero()
    wait(lambda: not ground.bill()["open_runtimes"], "every life is recorded")
    unbalanced: list[str] = []

    def balances() -> bool:
        unbalanced[:] = ground.unbalanced()
        return not unbalanced

    with contextlib.suppress(NotSo):  # what a replica wrote at its end comes by itself
        wait(balances, "the bill balances", SETTLED_S)
    wrong = ground.unsettled() + unbalanced
    for words in (["billing", "verify"], ["fsck"]):
        status, out, err = ground.kelvin(*words)
        if status != 0:
            wrong.append(f"kelvin {' '.join(words)} ends with {status}: {err.strip() or out.strip()[-500:]}")
    with contextlib.suppress(NotSo):  # what stays is in the list
        wait(lambda: not unfinished(ground.data) + stray_sockets(ground.data), "nothing is left", 5)
    wrong += unfinished(ground.data) + stray_sockets(ground.data)
    ground.stop()
    wrong += ended(ground.data)
    with contextlib.suppress(NotSo):  # a neighbour of ours may have made some that it has yet to open
        wait(lambda: not leftovers.shared_memory() - shared, "no shared memory is left", 5)
    wrong += [f"shared memory is left: {name}" for name in leftovers.shared_memory() - shared]
    return None, wrong


@dataclass(frozen=True, slots=True)
class Yard:
    """Where drills run: a directory, models, a source of chance, and who is told of each result."""

    work: Path
    models: TinyModels
    chance: random.Random
    tell: Callable[[Result], None]


def group(yard: Yard, name: str, drill: Callable[[], None]) -> None:
    """Cells on one installation: where that does not even stand, the group is red, and the others go on."""
    began = time.monotonic()
    try:
        drill()
    except TROUBLE as error:
        yard.tell(Result(f"all of {name}", None, (f"{type(error).__name__}: {error}",), time.monotonic() - began))


def drill_stage(yard: Yard, stage: Stage, processes: Iterable[Process]) -> None:
    """Each of these processes killed at the stage, in any order, on one installation; then its closing checks."""
    order, shared, number = list(processes), leftovers.shared_memory(), count()
    yard.chance.shuffle(order)
    program = "tests.e2e.held_activator" if stage is Stage.LAST_BYTE else "kelvin.main"

    def fresh() -> AbstractContextManager[Ground]:
        return standing(Ground(yard.work / f"{stage}-{next(number)}", program=program), yard.models.served)

    with ExitStack() as stack:
        ground = stack.enter_context(fresh())
        for process in order:
            expected = kill_expected(process, stage)
            cell = partial(kill_at, ground, yard.models, process, stage, expected)
            yard.tell(result := timed(f"{process}/{stage}", cell))
            if result.seen is None:  # nobody knows in which state it was left
                stack.close()
                ground = stack.enter_context(fresh())
        yard.tell(timed(f"after {stage}", partial(closing_checks, ground, shared)))
