"""`kelvin bench load`: time how long each loader takes until a consumer has read every byte of a model.

All loaders of a size are measured in turn within one round. Each round begins with another loader, and the page cache
is prepared and checked before each load. Kelvin leases a pushed version from a running installation; the other loaders
read the pushed files, which hold the same tensors.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from coldstart_bench.harness import capacity_check
from coldstart_bench.harness.installation import Installation, InstallationFailed, running_installation
from coldstart_bench.harness.machine_state import drop_page_cache, warm_page_cache
from coldstart_bench.harness.program_runner import Program, ProgramFailed, make_model, program_output
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report import plots
from coldstart_bench.report.bench_report import MissingFigure
from coldstart_bench.report.load_report import (
    FROM_DISK,
    KELVIN,
    Contender,
    LoadFigures,
    LoadTiming,
    State,
    choose_contenders,
    judge,
    rows_of,
    table,
)
from coldstart_bench.suites.bench_runner import SIZES, Bench, BenchPlan, option, scratch_directory, with_sizes
from coldstart_bench.suites.floor_bench import HYPERVISOR_NOTE, READERS

NEED: Final = capacity_check.ResourceNeed(disk_times=5.0, memory_times=3.0)
TENANT: Final = "default"
MODEL: Final = "bench"
CONSUMER_NOTE: Final = (
    "consume: one thread sums the 64-bit words of all tensors, the same for all loaders; subtract it, or compare totals"
)

TAGS_NOTE: Final = (
    "kelvin, cold and hot: the first round hashed the chunk files, later ones compare their 128-bit tags; "
    "KELVIN_RECHECK=digest hashes in each"
)


@dataclass(frozen=True, slots=True)
class LoadPlan(BenchPlan):
    """Options of `kelvin bench load`. `known` is called after each size."""

    sizes_bytes: Sequence[int]
    repeats: int
    contenders: Sequence[Contender]
    device: str
    seed: int = 1


class _LoadRun:
    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.takes: ResultCollector[LoadTiming] = ResultCollector(plan.tell)
        self.floors: ResultCollector[float] = ResultCollector(plan.tell)

    def figures(self) -> LoadFigures:
        absent = [MissingFigure(each.name, "not installed") for each in self.plan.contenders if not each.installed]
        return LoadFigures(
            rows_of(self.takes.figures, self.floors.figures),
            self.plan.device,
            failures=(*absent, *self.takes.failures, *self.floors.failures),
            notes=(HYPERVISOR_NOTE, CONSUMER_NOTE, TAGS_NOTE),
        )


def run(plan: LoadPlan, scratch: Path) -> LoadFigures:
    """Measure all sizes. Raises InstallationFailed, ProgramFailed. `known` has received the smaller sizes by then."""
    so_far = _LoadRun(plan)
    for size_bytes in plan.sizes_bytes:
        with scratch_directory(scratch) as place:
            _measure_size(so_far, place, size_bytes)
        plan.known(so_far.figures())
    return so_far.figures()


@dataclass(frozen=True, slots=True)
class _LoadFixture:
    """One size: the model in the form of each loader, and the checksum that all must reach."""

    kelvin: Installation | None
    size_bytes: int
    paths: dict[str, Path | str]  # by `Contender.file`
    checksum: int
    programs: dict[str, Program]

    @property
    def installation(self) -> Installation:
        """The installation, which runs only if Kelvin is measured."""
        assert self.kelvin is not None
        return self.kelvin

    def files(self, contender: Contender) -> list[Path]:
        if contender.file == "version":
            return [path for path in self.installation.nvme_files() if path.stat().st_size]
        path = Path(self.paths[contender.file])
        return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _measure_size(so_far: _LoadRun, scratch: Path, size_bytes: int) -> None:
    plan = so_far.plan
    present = [contender for contender in plan.contenders if contender.installed]
    plan.tell(f"making a model of {size_bytes / 1e9:g} GB")
    make_model(scratch / "model", size_bytes, plan.seed)
    weights = scratch / "model" / "model.safetensors"
    size_bytes = weights.stat().st_size  # the real size, which differs from the requested one because layers are whole
    paths: dict[str, Path | str] = {"directory": scratch / "model", "safetensors": weights}
    if any(contender.file == "tensors" for contender in present):
        paths["tensors"] = scratch / "model.tensors"
        program_output("snapshotter.intake.tensorizer_writer", weights, scratch / "model.tensors")
    checksum = int(program_output("coldstart_bench.programs.reference_checksum", weights))
    with contextlib.ExitStack() as stack:
        kelvin: Installation | None = None
        if KELVIN in present:
            plan.tell("pushing it")
            settings = {"KELVIN_HOST_BYTES": str(size_bytes + size_bytes // 8 + (1 << 30))}
            kelvin = stack.enter_context(running_installation(scratch / "data", settings=settings))
            paths["version"] = kelvin.push(scratch / "model", MODEL)
        fixture = _LoadFixture(kelvin, size_bytes, paths, checksum, {})
        for contender in present:
            _start(so_far, fixture, contender, stack)
        reader = stack.enter_context(Program("floors.floor_read"))
        if kelvin is not None:
            _fill(fixture)
        for turn in range(plan.repeats):
            plan.tell(f"{size_bytes / 1e9:g} GB: round {turn + 1} of {plan.repeats}")
            _round(so_far, fixture, present, reader, turn)


def _start(so_far: _LoadRun, fixture: _LoadFixture, contender: Contender, stack: contextlib.ExitStack) -> None:
    words = contender.arguments if contender is not KELVIN else (str(fixture.installation.data / "run"),)
    try:
        fixture.programs[contender.name] = stack.enter_context(Program(contender.program, *words))
    except ProgramFailed as error:
        if contender is KELVIN:
            raise
        for state in FROM_DISK:
            so_far.takes.record_failure((fixture.size_bytes, state, contender.name), error)


def _fill(fixture: _LoadFixture) -> None:
    """Load the version, and wait until all of it is in the NVMe tier."""
    _load(fixture, KELVIN, "cpu")
    fixture.installation.empty_tier("host")  # waits for admissions to end


def _round(so_far: _LoadRun, fixture: _LoadFixture, present: Sequence[Contender], reader: Program, turn: int) -> None:
    shift = turn % len(present)
    for state in FROM_DISK:
        for contender in (*present[shift:], *present[:shift]):
            _take(so_far, fixture, contender, state)
        _read_floors(so_far, fixture, present[0], reader, state)
    if KELVIN in present:
        _take(so_far, fixture, KELVIN, "host")


def _take(so_far: _LoadRun, fixture: _LoadFixture, contender: Contender, state: State) -> None:
    def loaded() -> LoadTiming:
        _prepare(fixture, contender, state)
        answer = _load(fixture, contender, so_far.plan.device)
        tier = "host" if state == "host" else "nvme"
        if answer["checksum"] != fixture.checksum:
            raise ProgramFailed(f"WRONG BYTES: their sum is {answer['checksum']}, the file's {fixture.checksum}")
        if contender is KELVIN and {name for name, size in answer["bytes_by_tier"].items() if size} != {tier}:
            raise InstallationFailed(f"bytes came from {answer['bytes_by_tier']} instead of '{tier}'")
        return LoadTiming(answer["load_s"], answer["consume_s"])

    so_far.takes.measure((fixture.size_bytes, state, contender.name), loaded)


def _prepare(fixture: _LoadFixture, contender: Contender, state: State) -> None:
    """Prepare the state for a load. Raises PageCacheNotReady."""
    if contender is KELVIN:
        if state == "host":
            _load(fixture, KELVIN, "cpu")  # the measured load then finds it in host memory
            return
        fixture.installation.empty_tier("host")
    files = fixture.files(contender)
    drop_page_cache(files) if state == "cold" else warm_page_cache(files)


def _load(fixture: _LoadFixture, contender: Contender, device: str) -> Any:
    path = str(fixture.paths[contender.file])
    return fixture.programs[contender.name].call(path=path, tenant=TENANT, device=device)


def _read_floors(so_far: _LoadRun, fixture: _LoadFixture, contender: Contender, reader: Program, state: State) -> None:
    """Measure plain reads of the files that the first contender (Kelvin, if it takes part) has just read."""
    files = fixture.files(contender)

    def read(threads: int) -> float:
        drop_page_cache(files) if state == "cold" else warm_page_cache(files)
        answer = reader.call(files=[str(path) for path in files], threads=threads, direct=state == "cold")
        return float(answer["seconds"])

    method = "O_DIRECT" if state == "cold" else "page cache"
    for threads in READERS:
        key = (fixture.size_bytes, state, f"floor: {method}, {threads} threads")
        so_far.floors.measure(key, functools.partial(read, threads))


BENCH: Final = Bench(
    "load",
    """Time loading a model from disk or memory until every byte was read, for Kelvin and rival loaders.

    Loaders that are not installed, fail, or return wrong bytes are listed.
    """,
    (
        *SIZES,
        option("--repeats", 7, click.IntRange(1, 1000), "Rounds per size."),
        option(
            "--loaders",
            "",
            str,
            "Only these, separated by commas. [default: all]",
            "contenders",
            convert=lambda words: choose_contenders([name for name in words.split(",") if name]),
        ),
        option("--device", "cpu", str, "Device of the tensors: cpu, cuda or cuda:N."),
    ),
    with_sizes(LoadPlan),
    run,
    table,
    judge,
    lambda plan, disk, memory: capacity_check.refusal(plan.sizes_bytes, NEED, disk, memory),
    plots.draw_load,
)
