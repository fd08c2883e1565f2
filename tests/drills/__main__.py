"""`make drills`: drill the whole matrix, or the cells that `--cell` names. Exits with 1 if a cell is red.

A cell is PROCESS/STAGE, FILE/DAMAGE or FAULT/OPERATION.

`--table` prints the expected outcomes, as in `docs/drills.md`, and drills nothing. `--seed` repeats an order of kills.
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

from tests.drills.fault_scenes import with_own_mounts
from tests.drills.matrix import (
    DAMAGED,
    FAULTS,
    FIRST,
    KILLS,
    DamageKind,
    FaultKind,
    FirstStage,
    Operation,
    Stage,
    VictimProcess,
    find_empty_cells,
    markdown,
)

Kills = dict[Stage, list[VictimProcess]]
Firsts = dict[VictimProcess, list[FirstStage]]
Troubles = dict[FaultKind, list[Operation]]
Damages = list[tuple[str, DamageKind]]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells to drill: kills by stage, first stages by process, damages by file, operations by fault."""

    kills: Kills = field(default_factory=dict)
    firsts: Firsts = field(default_factory=dict)
    damages: Damages = field(default_factory=list)
    troubles: Troubles = field(default_factory=dict)


def chosen(cells: Sequence[str]) -> Cells:
    """Return the named cells, or all if none is named. Raises ValueError for an unknown cell."""
    if not cells:
        return Cells(
            {stage: list(VictimProcess) for stage in Stage},
            {process: list(FirstStage) for process in VictimProcess},
            [(file, damage) for file in DAMAGED for damage in DamageKind],
            {fault: list(Operation) for fault in FaultKind},
        )
    named = Cells()
    for cell in cells:
        who, _, where = cell.rpartition("/")
        if who in DAMAGED:
            named.damages.append((who, DamageKind(where)))
        elif who in set(VictimProcess) and where in set(FirstStage):
            named.firsts.setdefault(VictimProcess(who), []).append(FirstStage(where))
        elif who in set(VictimProcess):
            named.kills.setdefault(Stage(where), []).append(VictimProcess(who))
        else:
            named.troubles.setdefault(FaultKind(who), []).append(Operation(where))
    return named


def main(arguments: Sequence[str]) -> int:
    """Print each cell when it ends, and the red cells again at the end."""
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
    if empty := find_empty_cells(KILLS, FIRST, FAULTS):
        parser.error(f"empty cells: {empty}")
    try:
        cells = chosen(options.cell)
    except ValueError as error:
        parser.error(str(error))
    if FaultKind.DISK_FULL in cells.troubles or FaultKind.READ_ONLY in cells.troubles:
        with_own_mounts()
    return run(cells, options.seed)


def run(cells: Cells, seed: int) -> int:
    """Drill the cells. Return 1 if any is red, else 0."""
    from transformers.utils.logging import disable_progress_bar

    from tests.drills.damage_drill import drill_damage
    from tests.drills.drill_models import TinyModels
    from tests.drills.fault_drill import drill_fault
    from tests.drills.first_minute_drill import drill_first
    from tests.drills.stage_drill import CellResult, DrillContext, drill_stage, run_group  # these import torch

    disable_progress_bar()
    results: list[CellResult] = []

    def tell(result: CellResult) -> None:
        results.append(result)
        print(result, flush=True)

    began = time.monotonic()
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kelvin-drills-") as place:
        context = DrillContext(Path(place), TinyModels(Path(place)), random.Random(seed), tell)
        for stage, processes in cells.kills.items():
            run_group(context, str(stage), partial(drill_stage, context, stage, processes))
        for process, stages in cells.firsts.items():
            run_group(context, f"the first minute of {process}", partial(drill_first, context, process, stages))
        if cells.damages:
            run_group(context, "damaged files", partial(drill_damage, context, cells.damages))
        for fault, operations in cells.troubles.items():
            run_group(context, str(fault), partial(drill_fault, context, fault, operations))
    red = [result for result in results if result.wrong]
    print(f"{len(results) - len(red)} of {len(results)} green in {time.monotonic() - began:.0f} s")
    print("".join(f"{result}\n" for result in red), end="")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
