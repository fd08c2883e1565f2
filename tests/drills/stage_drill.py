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

from coldstart_bench.harness.installation import find_leftovers, find_stray_sockets, find_unfinished_writes
from coldstart_bench.harness.request_outcome import ANSWERED, RequestEnd, RequestOutcome
from tests.drills import leftovers
from tests.drills.bill_checks import outcome_problems
from tests.drills.drill_installation import AWAY, SETTLED_S, DrillInstallation, running_drill_installation, wait
from tests.drills.drill_models import TinyModels
from tests.drills.matrix import Stage, VictimProcess, kill_expected
from tests.drills.operations import PreconditionFailed
from tests.drills.stages import STAGE_CONTEXTS, HeldOperation
from tests.e2e.installation_processes import IMPORTS_TESTS

TRIES: Final = 4
ENDS_INSTALLATION: Final = (VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING)  # whose death ends the installation
EXPECTED_ERRORS: Final = (PreconditionFailed, psutil.Error, *AWAY)


@dataclass(frozen=True, slots=True)
class CellResult:
    """Of a cell, or of the checks that end a group."""

    name: str
    seen: RequestOutcome | None
    wrong: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        verdict, seen = "RED  " if self.wrong else "green", str(self.seen or "")
        return f"{verdict} {self.name:28} {seen:24} {self.seconds:5.1f} s  {'; '.join(self.wrong)}".rstrip()


def run_cell(name: str, work: Callable[[], tuple[RequestOutcome | None, list[str]]]) -> CellResult:
    """What is not so is why a cell is red."""
    began = time.monotonic()
    try:
        seen, wrong = work()
    except EXPECTED_ERRORS as error:
        seen, wrong = None, [f"{type(error).__name__}: {error}"]
    return CellResult(name, seen, tuple(wrong), time.monotonic() - began)


def choose_victims(
    ground: DrillInstallation, process: VictimProcess, held: HeldOperation | None
) -> list[psutil.Process]:
    """Who is killed: one process, every standby, or every process that there is. Raises PreconditionFailed
    where nobody is there.
    """
    match process:
        case VictimProcess.CLIENT if held is not None:
            return [psutil.Process(held.operation.pid)]
        case VictimProcess.RUNTIME if held is not None and held.runtime is not None:
            return [held.runtime]
        case VictimProcess.EVERYTHING:
            return ground.everything()
        case VictimProcess.STANDBY:
            found = ground.standbys(held.runtime if held else None)
            if not found:
                raise PreconditionFailed("no standby is there to be killed")
            return found
        case _:
            return [ground.process(process)]


def kill_at(
    ground: DrillInstallation, models: TinyModels, process: VictimProcess, stage: Stage, expected: RequestOutcome
) -> tuple[RequestOutcome, list[str]]:
    """What the client saw, and what is wrong. A kill that missed its stage is no drill: it is tried again."""
    for _ in range(TRIES):
        ground.wait_until_whole()
        with STAGE_CONTEXTS[stage](ground, models) as held:
            dying = choose_victims(ground, process, held) if held.is_there() else []
            ground.note_family()
            hit = bool(dying) and held.is_there()
            if hit:
                kill(dying)
            held.release()
            if hit and process in ENDS_INSTALLATION:
                ground.restart()
            seen = held.operation.outcome()
            endings = [*held.operation.endings(), *(held.beside.endings() if held.beside else ())]
            wrong = outcome_problems(expected, seen) if hit else []
            ground.wait_until_whole()
            if seen != ANSWERED and held.again is not None:
                wrong += _once_more(held)
        ground.expect_answer()
        wrong += ground.settle(billed(process, endings))
        if hit or wrong:
            return seen, wrong
    raise PreconditionFailed(f"none of {TRIES} kills met its stage")


def billed(process: VictimProcess | None, endings: Iterable[RequestEnd]) -> list[RequestEnd]:
    """What the bill may have of them after that death."""
    return [replace(ending, unrecorded=process is VictimProcess.EVERYTHING) for ending in endings]


def kill(dying: Iterable[psutil.Process]) -> None:
    """All at once. One that ends by itself meanwhile is as good as killed."""
    for each in dying:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _once_more(held: HeldOperation) -> list[str]:
    assert held.again is not None
    again = held.again()
    try:
        return [] if (seen := again.outcome()) == ANSWERED else [f"the same again is {seen}"]
    finally:
        again.close()


def check_group(ground: DrillInstallation, shared: frozenset[str]) -> tuple[None, list[str]]:
    """Of a group: bill, ledger and store by their commands, then the end of the installation, and what is left."""
    ground.to_zero()
    wait(lambda: not ground.bill()["open_runtimes"], "every life is recorded")
    unbalanced: list[str] = []

    def balances() -> bool:
        unbalanced[:] = ground.unbalanced()
        return not unbalanced

    with contextlib.suppress(PreconditionFailed):  # what a replica wrote at its end comes by itself
        wait(balances, "the bill balances", SETTLED_S)
    wrong = ground.unsettled() + unbalanced
    for words in (["billing", "verify"], ["fsck"]):
        status, out, err = ground.kelvin(*words)
        if status != 0:
            wrong.append(f"kelvin {' '.join(words)} ends with {status}: {err.strip() or out.strip()[-500:]}")
    with contextlib.suppress(PreconditionFailed):  # what stays is in the list
        wait(lambda: not find_unfinished_writes(ground.data) + find_stray_sockets(ground.data), "nothing is left", 5)
    wrong += find_unfinished_writes(ground.data) + find_stray_sockets(ground.data)
    ground.stop()
    wrong += find_leftovers(ground.data)
    with contextlib.suppress(PreconditionFailed):  # a neighbour of ours may have made some that it has yet to open
        wait(lambda: not leftovers.shared_memory() - shared, "no shared memory is left", 5)
    wrong += [f"shared memory is left: {name}" for name in leftovers.shared_memory() - shared]
    return None, wrong


@dataclass(frozen=True, slots=True)
class DrillContext:
    """Where drills run: a directory, models, a source of chance, and who is told of each result."""

    work: Path
    models: TinyModels
    chance: random.Random
    tell: Callable[[CellResult], None]


def run_group(context: DrillContext, name: str, drill: Callable[[], None]) -> None:
    """Cells on one installation: where that does not even stand, the group is red, and the others go on."""
    began = time.monotonic()
    try:
        drill()
    except EXPECTED_ERRORS as error:
        context.tell(
            CellResult(f"all of {name}", None, (f"{type(error).__name__}: {error}",), time.monotonic() - began)
        )


def drill_stage(context: DrillContext, stage: Stage, processes: Iterable[VictimProcess]) -> None:
    """Each of these processes killed at the stage, in any order, on one installation; then its closing checks."""
    order, shared, number = list(processes), leftovers.shared_memory(), count()
    context.chance.shuffle(order)
    program = "tests.e2e.failures.held_activator" if stage is Stage.LAST_BYTE else "kelvin.cli.main"

    def fresh() -> AbstractContextManager[DrillInstallation]:
        return running_drill_installation(
            DrillInstallation(context.work / f"{stage}-{next(number)}", program=program, settings=IMPORTS_TESTS),
            context.models.served,
        )

    with ExitStack() as stack:
        ground = stack.enter_context(fresh())
        for process in order:
            expected = kill_expected(process, stage)
            cell = partial(kill_at, ground, context.models, process, stage, expected)
            context.tell(result := run_cell(f"{process}/{stage}", cell))
            if result.seen is None:  # nobody knows in which state it was left
                stack.close()
                ground = stack.enter_context(fresh())
        context.tell(run_cell(f"after {stage}", partial(check_group, ground, shared)))
