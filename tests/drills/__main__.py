"""`make drills`: the whole matrix, or the cells that `--cell` names; exit code 1 on red.

A cell is PROCESS/STAGE, FILE/DAMAGE or FAULT/OPERATION.

`--table` prints what is expected, as `docs/drills.md` has it, and drills nothing. `--seed` repeats an order of kills.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.drills.matrix import (
    DAMAGED,
    FAULTS,
    FIRST,
    KILLS,
    Damage,
    Fault,
    FirstStage,
    Operation,
    Process,
    Stage,
    gaps,
    markdown,
)
from tests.drills.scenes import with_own_mounts

Kills = dict[Stage, list[Process]]
Firsts = dict[Process, list[FirstStage]]
Troubles = dict[Fault, list[Operation]]
Damages = list[tuple[str, Damage]]


@dataclass(frozen=True, slots=True)
class Cells:
    """What is drilled: kills by stage, first stages by process, damages by file, operations by fault."""

    kills: Kills = field(default_factory=dict)
    firsts: Firsts = field(default_factory=dict)
    damages: Damages = field(default_factory=list)
    troubles: Troubles = field(default_factory=dict)


def chosen(cells: Sequence[str]) -> Cells:
    """Return those that are named, all where none is. Raises ValueError for what is no cell."""
    if not cells:
        return Cells(
            {stage: list(Process) for stage in Stage},
            {process: list(FirstStage) for process in Process},
            [(file, damage) for file in DAMAGED for damage in Damage],
            {fault: list(Operation) for fault in Fault},
        )
    named = Cells()
    for cell in cells:
        who, _, where = cell.rpartition("/")
        if who in DAMAGED:
            named.damages.append((who, Damage(where)))
        elif who in set(Process) and where in set(FirstStage):
            named.firsts.setdefault(Process(who), []).append(FirstStage(where))
        elif who in set(Process):
            named.kills.setdefault(Stage(where), []).append(Process(who))
        else:
            named.troubles.setdefault(Fault(who), []).append(Operation(where))
    return named


def main(arguments: Sequence[str]) -> int:
    """Prints each cell as it ends, and what is red once more at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument(
        "--cell", action="append", default=[], help="PROCESS/STAGE, FILE/DAMAGE or FAULT/OPERATION; repeatable"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown(), end="")
        return 0
    if empty := gaps(KILLS, FIRST, FAULTS):
        parser.error(f"empty cells: {empty}")
    try:
        cells = chosen(options.cell)
    except ValueError as error:
        parser.error(str(error))
    if Fault.DISK_FULL in cells.troubles or Fault.READ_ONLY in cells.troubles:
        with_own_mounts()
    return run(cells, options.seed)


def run(cells: Cells, seed: int) -> int:
    """Exit code 1 where anything is red."""
    from transformers.utils.logging import disable_progress_bar

    from tests.drills.damage import drill_damage
    from tests.drills.drill import Result, Yard, drill_stage, group  # they bring torch
    from tests.drills.first import drill_first
    from tests.drills.models import TinyModels
    from tests.drills.trouble import drill_fault

    disable_progress_bar()
    results: list[Result] = []

    def tell(result: Result) -> None:
        results.append(result)
        print(result, flush=True)

    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kelvin-drills-") as place:
        yard = Yard(Path(place), TinyModels(Path(place)), random.Random(seed), tell)
        for stage, processes in cells.kills.items():
            group(yard, str(stage), partial(drill_stage, yard, stage, processes))
        for process, stages in cells.firsts.items():
            group(yard, f"the first minute of {process}", partial(drill_first, yard, process, stages))
        if cells.damages:
            group(yard, "damaged files", partial(drill_damage, yard, cells.damages))
        for fault, operations in cells.troubles.items():
            group(yard, str(fault), partial(drill_fault, yard, fault, operations))
    red = [result for result in results if result.wrong]
    print(f"{len(results) - len(red)} of {len(results)} green in {time.monotonic() - began:.0f} s")
    print("".join(f"{result}\n" for result in red), end="")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
