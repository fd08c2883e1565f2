"""`kelvin bench floor`: what this machine can do at most with the bytes of a cold start; a frozen program for each.

All floors are measured in turn within one round. Reads are of the files that the caller names, or of one made up.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from coldstart_bench.environment import (
    commit,
    drop_page_cache,
    load_1m,
    machine,
    warm_page_cache,
)
from coldstart_bench.peers import PeerFailed
from coldstart_bench.programs import Program
from coldstart_bench.statistics import median_of
from coldstart_bench.tally import Tally

READERS: Final = (1, 2, 4)
DEVICE: Final = Path("/dev/nvidiactl")  # looked for before torch is: it has to be there for every CUDA device
_PIECE: Final = 16 << 20
HYPERVISOR_NOTE: Final = (
    "cold: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may still be warm"
)


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """What to measure; without `files` one of `size_bytes` is made. `tell` hears one line per step."""

    files: Sequence[Path]
    size_bytes: int
    repeats: int
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Floor:
    """One figure: which program answers it, what it is asked, and in which state the page cache has to be."""

    name: str
    program: str
    question: Mapping[str, object] = field(default_factory=dict)
    files: Literal["cold", "hot"] | None = None


class FloorRow(msgspec.Struct, frozen=True):
    """Median and interval, in `unit`: GB/s, or ms where no bytes move."""

    name: str
    unit: Literal["GB/s", "ms"]
    median: float
    low: float
    high: float
    n: int


class FloorReport(msgspec.Struct, frozen=True):
    """What `--json` writes. `absent` says why a floor has no row."""

    bytes: int
    files: int
    rows: tuple[FloorRow, ...]
    absent: dict[str, str]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = (HYPERVISOR_NOTE,)


def floors_of(total_bytes: int) -> tuple[Floor, ...]:
    """All of them, in the order of a round."""
    copied = {"bytes": total_bytes, "files": []}
    return (
        *(
            Floor(f"O_DIRECT into huge pages, {n} threads", "floor_read", {"threads": n, "direct": True}, "cold")
            for n in READERS
        ),
        *(
            Floor(f"page cache into huge pages, {n} threads", "floor_read", {"threads": n, "direct": False}, "hot")
            for n in READERS
        ),
        Floor("page cache, mapped, one touch per page", "floor_memory", {"do": "touch", "bytes": 0}, "hot"),
        Floor("memcpy into recycled huge pages", "floor_memory", {"do": "memcpy", **copied}),
        Floor("BLAKE3, one core", "floor_memory", {"do": "hash", **copied}),
        Floor("pinned memory to device", "floor_device", {"bytes": total_bytes}),
        Floor("fork of a process with torch", "floor_fork"),
    )


def run(plan: FloorPlan) -> FloorReport:
    """Raises OSError where a file can't be read."""
    load_before = load_1m()
    with contextlib.ExitStack() as stack:
        files = list(plan.files) or [stack.enter_context(_made_up(plan.size_bytes))]
        total = sum(path.stat().st_size for path in files)
        seconds, absent = _measured(plan, files, floors_of(total), stack)
    return FloorReport(total, len(files), rows_of(seconds), absent, machine(), load_before, commit())


@contextlib.contextmanager
def _made_up(size_bytes: int) -> Iterator[Path]:
    """A file of random bytes below $TMPDIR: what compresses would flatter some disks."""
    with tempfile.NamedTemporaryFile(prefix="kelvin-bench-") as file:
        for at in range(0, size_bytes, _PIECE):
            file.write(os.urandom(min(_PIECE, size_bytes - at)))
        file.flush()
        yield Path(file.name)


Taken = tuple[float, int]  # seconds and bytes of one measurement


def _measured(
    plan: FloorPlan, files: Sequence[Path], floors: Sequence[Floor], stack: contextlib.ExitStack
) -> tuple[dict[str, list[Taken]], dict[str, str]]:
    tally: Tally[Taken] = Tally(plan.tell)
    programs: dict[str, Program] = {}
    names = [str(path) for path in files]

    def measure(floor: Floor) -> Taken:
        if floor.program == "floor_device" and not DEVICE.exists():
            raise PeerFailed("no CUDA device")
        if floor.program not in programs:
            programs[floor.program] = stack.enter_context(Program(floor.program))
        answer = _ask(programs[floor.program], floor, files, names)
        return answer["seconds"], answer["bytes"]

    for turn in range(plan.repeats):
        plan.tell(f"round {turn + 1} of {plan.repeats}")
        for floor in floors:
            tally.take((0, floor.files or "", floor.name), functools.partial(measure, floor))
    taken = {name: each for (_, _, name), each in tally.figures.items()}
    return taken, {failed.system: failed.reason for failed in tally.failures}


def _ask(program: Program, floor: Floor, files: Sequence[Path], names: Sequence[str]) -> Any:
    match floor.files:
        case "cold":
            drop_page_cache(files)
        case "hot":
            warm_page_cache(files)
        case None:
            return program.ask(**floor.question)
    return program.ask(**{**floor.question, "files": names})


def rows_of(taken: Mapping[str, Sequence[Taken]]) -> tuple[FloorRow, ...]:
    """In the order given."""
    rows = []
    for name, each in taken.items():
        moves = each[0][1] > 0
        found = median_of([size / seconds / 1e9 if moves else seconds * 1e3 for seconds, size in each])
        rows.append(FloorRow(name, "GB/s" if moves else "ms", found.median, found.low, found.high, found.n))
    return tuple(rows)


def table(report: FloorReport) -> str:
    """Return the report as the text that a person reads."""
    lines = [f"{report.bytes / 1e9:.3g} GB in {report.files} files"]
    lines += [f"{'floor':<42} {'median':>12}  {'95 % interval':>19}  {'n':>3}"]
    for row in report.rows:
        interval = f"{row.low:8.2f} - {row.high:8.2f}"
        lines.append(f"{row.name:<42} {row.median:7.2f} {row.unit:<4}  {interval:>19}  {row.n:>3}")
    lines += [f"{name:<42} not measured: {why}" for name, why in report.absent.items()]
    return "\n".join(lines)
