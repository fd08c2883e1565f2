"""`kelvin bench floor`: measure what this machine can do at most with the bytes of a cold start.

Each floor is a frozen program. All floors are measured in turn within one round. Reads use FILES, or a generated file.
"""

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from coldstart_bench.harness.capacity_check import find_shortage
from coldstart_bench.harness.machine_state import drop_page_cache, warm_page_cache
from coldstart_bench.harness.program_runner import Program, ProgramFailed
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report.bench_report import BenchFailed, Figures, MissingFigure, align
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.process.option_types import FiniteNumber

READERS: Final = (1, 2, 4)
DEVICE: Final = Path("/dev/nvidiactl")  # exists if there is any CUDA device; checked before torch is imported
_PIECE: Final = 16 << 20
HYPERVISOR_NOTE: Final = (
    "cold: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may still be warm"
)


@dataclass(frozen=True, slots=True)
class FloorPlan(BenchPlan):
    """Options of `kelvin bench floor`. Without `files`, a file of `size_bytes` is generated."""

    files: Sequence[Path]
    size_bytes: int
    repeats: int


@dataclass(frozen=True, slots=True)
class FloorProgram:
    """One figure: the program that measures it, its question, and the state of the page cache that it needs."""

    name: str
    program: str
    question: Mapping[str, object] = field(default_factory=dict)
    files: Literal["cold", "hot"] | None = None


class FloorRow(msgspec.Struct, frozen=True):
    """Median and interval in `unit`: GB/s, or ms if no bytes move."""

    name: str
    unit: Literal["GB/s", "ms"]
    median: float
    low: float
    high: float
    n: int


class FloorFigures(Figures, frozen=True):
    """Rows of all floors. Floors without a row are among the failures."""

    bytes: int
    files: int
    rows: tuple[FloorRow, ...]


def floors_of(total_bytes: int) -> tuple[FloorProgram, ...]:
    """Return all floors in the order of a round."""
    copied = {"bytes": total_bytes, "files": []}
    return (
        *(
            FloorProgram(
                f"O_DIRECT into huge pages, {n} threads", "floors.floor_read", {"threads": n, "direct": True}, "cold"
            )
            for n in READERS
        ),
        *(
            FloorProgram(
                f"page cache into huge pages, {n} threads", "floors.floor_read", {"threads": n, "direct": False}, "hot"
            )
            for n in READERS
        ),
        FloorProgram(
            "page cache, mapped, one touch per page", "floors.floor_memory", {"do": "touch", "bytes": 0}, "hot"
        ),
        FloorProgram("memcpy into recycled huge pages", "floors.floor_memory", {"do": "memcpy", **copied}),
        FloorProgram("BLAKE3, one core", "floors.floor_memory", {"do": "hash", **copied}),
        FloorProgram("pinned memory to device", "floors.floor_device", {"bytes": total_bytes}),
        FloorProgram("fork of a process with torch", "floors.floor_fork"),
    )


def refusal(plan: FloorPlan, free_disk: int, free_memory: int) -> str | None:
    """Return why the generated file does not fit on the disk, or None."""
    return find_shortage(0 if plan.files else plan.size_bytes, 0, free_disk, free_memory)


def run(plan: FloorPlan, scratch: Path) -> FloorFigures:
    """Run the bench. Raises BenchFailed if a file can't be read."""
    try:
        with contextlib.ExitStack() as stack:
            files = list(plan.files) or [_make_random_file(scratch / "bytes", plan.size_bytes)]
            total = sum(path.stat().st_size for path in files)
            rows, absent = _measured(plan, files, floors_of(total), stack)
    except OSError as error:
        raise BenchFailed(str(error)) from error
    return FloorFigures(total, len(files), rows, failures=absent, notes=(HYPERVISOR_NOTE,))


def _make_random_file(path: Path, size_bytes: int) -> Path:
    """Make a file of random bytes: compressible bytes would be faster on some disks."""
    with path.open("wb") as file:
        for at in range(0, size_bytes, _PIECE):
            file.write(os.urandom(min(_PIECE, size_bytes - at)))
    return path


FloorSample = tuple[float, int]  # seconds and bytes of one measurement


def _measured(
    plan: FloorPlan, files: Sequence[Path], floors: Sequence[FloorProgram], stack: contextlib.ExitStack
) -> tuple[tuple[FloorRow, ...], tuple[MissingFigure, ...]]:
    tally: ResultCollector[FloorSample] = ResultCollector(plan.tell)
    programs: dict[str, Program] = {}
    names = [str(path) for path in files]

    def measure(floor: FloorProgram) -> FloorSample:
        if floor.program == "floors.floor_device" and not DEVICE.exists():
            raise ProgramFailed("no CUDA device")
        if floor.program not in programs:
            programs[floor.program] = stack.enter_context(Program(floor.program))
        answer = _ask(programs[floor.program], floor, files, names)
        return answer["seconds"], answer["bytes"]

    for turn in range(plan.repeats):
        plan.tell(f"round {turn + 1} of {plan.repeats}")
        for floor in floors:
            tally.measure((0, floor.files or "", floor.name), functools.partial(measure, floor))
    taken = {name: each for (_, _, name), each in tally.figures.items()}
    return floor_rows(taken), tuple(MissingFigure(failed.system, failed.reason) for failed in tally.failures)


def _ask(program: Program, floor: FloorProgram, files: Sequence[Path], names: Sequence[str]) -> Any:
    match floor.files:
        case "cold":
            drop_page_cache(files)
        case "hot":
            warm_page_cache(files)
        case None:
            return program.call(**floor.question)
    return program.call(**{**floor.question, "files": names})


def floor_rows(taken: Mapping[str, Sequence[FloorSample]]) -> tuple[FloorRow, ...]:
    """Return a row for each floor, in the given order."""
    rows = []
    for name, each in taken.items():
        moves = each[0][1] > 0
        found = median_of([size / seconds / 1e9 if moves else seconds * 1e3 for seconds, size in each])
        rows.append(FloorRow(name, "GB/s" if moves else "ms", found.median, found.low, found.high, found.n))
    return tuple(rows)


def table(figures: FloorFigures) -> str:
    """Return the figures as an aligned table."""
    rows = [("floor", "median", "", "95 % interval", "n")]
    for row in figures.rows:
        interval = f"{row.low:.2f} - {row.high:.2f}"
        rows.append((row.name, f"{row.median:.2f}", row.unit, interval, str(row.n)))
    return "\n".join([f"{figures.bytes / 1e9:.3g} GB in {figures.files} files", *align(rows)])


BENCH: Final = Bench(
    "floor",
    """Measure what this machine can do at most with the bytes of a cold start: read FILES (or a generated file), copy,
    hash, fork.""",
    (
        option(
            "--size",
            1.0,
            FiniteNumber(0.001, 1000),
            "GB of the generated file, without FILES.",
            "size_bytes",
            convert=lambda gb: int(gb * 1e9),
        ),
        option("--repeats", 7, click.IntRange(1, 1000), "Rounds."),
        click.Argument(["files"], nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False)),
    ),
    FloorPlan,
    run,
    table,
    refusal=refusal,
)
