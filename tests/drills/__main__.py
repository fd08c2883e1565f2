"""`make drills`: the whole matrix, or `--cell PROCESS/STAGE` and `--cell FAULT/OPERATION` of it; exit code 1 on red.

`--table` prints what is expected, as `docs/drills.md` has it, and drills nothing. `--seed` repeats an order of kills.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.drills.matrix import FAULTS, KILLS, Fault, Operation, Process, Stage, gaps, markdown
from tests.drills.scenes import with_own_mounts

Kills = dict[Stage, list[Process]]
Troubles = dict[Fault, list[Operation]]


def chosen(cells: Sequence[str]) -> tuple[Kills, Troubles]:
    """By stage and by fault; all where none is named. Raises ValueError for what is no cell."""
    if not cells:
        return {stage: list(Process) for stage in Stage}, {fault: list(Operation) for fault in Fault}
    kills, troubles = Kills(), Troubles()
    for cell in cells:
        who, _, where = cell.partition("/")
        if who in set(Process):
            kills.setdefault(Stage(where), []).append(Process(who))
        else:
            troubles.setdefault(Fault(who), []).append(Operation(where))
    return kills, troubles


def main(arguments: Sequence[str]) -> int:
    """Prints each cell as it ends, and what is red once more at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--cell", action="append", default=[], help="PROCESS/STAGE or FAULT/OPERATION; repeatable")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown(), end="")
        return 0
    if empty := gaps(KILLS, FAULTS):
        parser.error(f"empty cells: {empty}")
    try:
        kills, troubles = chosen(options.cell)
    except ValueError as error:
        parser.error(str(error))
    if Fault.DISK_FULL in troubles or Fault.READ_ONLY in troubles:
        with_own_mounts()
    return run(kills, troubles, options.seed)


def run(kills: Kills, troubles: Troubles, seed: int) -> int:
    """Exit code 1 where anything is red."""
    from transformers.utils.logging import disable_progress_bar

    from tests.drills.drill import Result, Yard, drill_stage, group  # they bring torch
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
        for stage, processes in kills.items():
            group(yard, str(stage), partial(drill_stage, yard, stage, processes))
        for fault, operations in troubles.items():
            group(yard, str(fault), partial(drill_fault, yard, fault, operations))
    red = [result for result in results if result.wrong]
    print(f"{len(results) - len(red)} of {len(results)} green in {time.monotonic() - began:.0f} s")
    print("".join(f"{result}\n" for result in red), end="")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
