"""Drill a cell: bring an operation to its stage, kill, and check the outcome and the bill. And groups of cells."""

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
ENDS_INSTALLATION: Final = (VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING)  # their death ends the installation
EXPECTED_ERRORS: Final = (PreconditionFailed, psutil.Error, *AWAY)


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell, or of the closing checks of a group."""

    name: str
    seen: RequestOutcome | None
    wrong: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        verdict, seen = "RED  " if self.wrong else "green", str(self.seen or "")
        return f"{verdict} {self.name:28} {seen:24} {self.seconds:5.1f} s  {'; '.join(self.wrong)}".rstrip()


def run_cell(name: str, work: Callable[[], tuple[RequestOutcome | None, list[str]]]) -> CellResult:
    """Run a cell. Its problems make it red."""
    began = time.monotonic()
    try:
        seen, wrong = work()
    except EXPECTED_ERRORS as error:
        seen, wrong = None, [f"{type(error).__name__}: {error}"]
    return CellResult(name, seen, tuple(wrong), time.monotonic() - began)


def choose_victims(
    installation: DrillInstallation, process: VictimProcess, held: HeldOperation | None
) -> list[psutil.Process]:
    """Return the victims: one process, all standbys, or all processes. Raises PreconditionFailed if there is none."""
    match process:
        case VictimProcess.CLIENT if held is not None:
            return [psutil.Process(held.operation.pid)]
        case VictimProcess.RUNTIME if held is not None and held.runtime is not None:
            return [held.runtime]
        case VictimProcess.EVERYTHING:
            return installation.all_processes()
        case VictimProcess.STANDBY:
            found = installation.standbys(held.runtime if held else None)
            if not found:
                raise PreconditionFailed("no standby is there to be killed")
            return found
        case _:
            return [installation.process(process)]


def kill_at(
    installation: DrillInstallation, models: TinyModels, process: VictimProcess, stage: Stage, expected: RequestOutcome
) -> tuple[RequestOutcome, list[str]]:
    """Return the client's outcome and all problems. A kill that missed its stage is repeated."""
    for _ in range(TRIES):
        installation.wait_until_whole()
        with STAGE_CONTEXTS[stage](installation, models) as held:
            dying = choose_victims(installation, process, held) if held.is_there() else []
            installation.record_processes()
            hit = bool(dying) and held.is_there()
            if hit:
                kill(dying)
            held.release()
            if hit and process in ENDS_INSTALLATION:
                installation.restart()
            seen = held.operation.outcome()
            endings = [*held.operation.endings(), *(held.beside.endings() if held.beside else ())]
            wrong = outcome_problems(expected, seen) if hit else []
            installation.wait_until_whole()
            if seen != ANSWERED and held.again is not None:
                wrong += _once_more(held)
        installation.expect_answer()
        wrong += installation.settle_bill(billed(process, endings))
        if hit or wrong:
            return seen, wrong
    raise PreconditionFailed(f"none of {TRIES} kills met its stage")


def billed(process: VictimProcess | None, endings: Iterable[RequestEnd]) -> list[RequestEnd]:
    """Return the requests as the bill may have them after that death."""
    return [replace(ending, unrecorded=process is VictimProcess.EVERYTHING) for ending in endings]


def kill(dying: Iterable[psutil.Process]) -> None:
    """Kill all at once. A process that ends by itself counts as killed."""
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


def check_group(installation: DrillInstallation, shared: frozenset[str]) -> tuple[None, list[str]]:
    """Run the closing checks of a group: bill, ledger and store by their commands, then the end and its leftovers."""
    installation.scale_to_zero()
    wait(lambda: not installation.bill()["open_runtimes"], "every life is recorded")
    unbalanced: list[str] = []

    def balances() -> bool:
        unbalanced[:] = installation.balance_problems()
        return not unbalanced

    with contextlib.suppress(PreconditionFailed):  # the records that a replica writes at its end arrive later
        wait(balances, "the bill balances", SETTLED_S)
    wrong = installation.unsettled_changes() + unbalanced
    for words in (["billing", "verify"], ["fsck"]):
        status, out, err = installation.kelvin(*words)
        if status != 0:
            wrong.append(f"kelvin {' '.join(words)} ends with {status}: {err.strip() or out.strip()[-500:]}")
    with contextlib.suppress(PreconditionFailed):  # what remains is in the list
        wait(
            lambda: not find_unfinished_writes(installation.data) + find_stray_sockets(installation.data),
            "nothing is left",
            5,
        )
    wrong += find_unfinished_writes(installation.data) + find_stray_sockets(installation.data)
    installation.stop()
    wrong += find_leftovers(installation.data)
    with contextlib.suppress(
        PreconditionFailed
    ):  # other tests may have created shared memory that they have not opened yet
        wait(lambda: not leftovers.shared_memory() - shared, "no shared memory is left", 5)
    wrong += [f"shared memory is left: {name}" for name in leftovers.shared_memory() - shared]
    return None, wrong


@dataclass(frozen=True, slots=True)
class DrillContext:
    """The context of drills: a directory, models, a random source, and a callback for results."""

    work: Path
    models: TinyModels
    chance: random.Random
    tell: Callable[[CellResult], None]


def run_group(context: DrillContext, name: str, drill: Callable[[], None]) -> None:
    """Run cells on one installation. If the installation does not start, the group is red, and other groups go on."""
    began = time.monotonic()
    try:
        drill()
    except EXPECTED_ERRORS as error:
        context.tell(
            CellResult(f"all of {name}", None, (f"{type(error).__name__}: {error}",), time.monotonic() - began)
        )


def drill_stage(context: DrillContext, stage: Stage, processes: Iterable[VictimProcess]) -> None:
    """Kill each of these processes at the stage, in random order, on one installation, then run the closing checks."""
    order, shared, number = list(processes), leftovers.shared_memory(), count()
    context.chance.shuffle(order)
    program = "tests.e2e.failures.held_activator" if stage is Stage.LAST_BYTE else "kelvin.cli.main"

    def fresh() -> AbstractContextManager[DrillInstallation]:
        return running_drill_installation(
            DrillInstallation(context.work / f"{stage}-{next(number)}", program=program, settings=IMPORTS_TESTS),
            context.models.served,
        )

    with ExitStack() as stack:
        installation = stack.enter_context(fresh())
        for process in order:
            expected = kill_expected(process, stage)
            cell = partial(kill_at, installation, context.models, process, stage, expected)
            context.tell(result := run_cell(f"{process}/{stage}", cell))
            if result.seen is None:  # the state of the installation is unknown
                stack.close()
                installation = stack.enter_context(fresh())
        context.tell(run_cell(f"after {stage}", partial(check_group, installation, shared)))
