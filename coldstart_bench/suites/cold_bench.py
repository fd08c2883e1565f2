"""`kelvin bench cold`: time the first token from zero over kept-alive TLS, next to the floor and to rivals.

All systems of a size are measured in turn within one round, so that a noisy neighbour affects all of them. For each
size it also measures: our start from the store; the stages of a start; the cost of the known answers, as the engine's
first step with and without them; and the memory of a start.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import click

from coldstart_bench.harness import capacity_check
from coldstart_bench.harness.installation import Installation, InstallationFailed, running_installation
from coldstart_bench.harness.machine_state import drop_page_cache, load_1m, warm_page_cache
from coldstart_bench.harness.process_stats import sampling_runtimes
from coldstart_bench.harness.program_runner import Program, ProgramFailed, make_model, run_from_pretrained
from coldstart_bench.harness.result_collector import ResultCollector
from coldstart_bench.report import plots
from coldstart_bench.report.bench_report import MissingFigure
from coldstart_bench.report.cold_report import (
    FLOOR,
    KELVIN,
    ColdFigures,
    MemoryFootprint,
    StageKey,
    cold_rows,
    cold_table,
    judge_cold,
    stages_of,
    table,
    without_probe,
)
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import SIZES, Bench, BenchPlan, option, scratch_directory, with_sizes

PROMPT_TOKENS: Final = 16
PROMPT_IDS: Final = tuple(range(7, 7 + PROMPT_TOKENS))
PROMPT: Final = " ".join(f"w{token - 2}" for token in PROMPT_IDS)  # the tokenizer of make_model: w<n> is token n + 2
FRESH, RESIDENT = "from_pretrained", "resident transformers"
STEP_WITH, STEP_WITHOUT = "first step with the probe", "first step without"
TENANT: Final = "default"
NEED: Final = capacity_check.ResourceNeed(disk_times=4.0, memory_times=4.0)
PROBE_NOTE: Final = (
    "kelvin without its probe: minus the time that known answers add to the engine's first step, measured in turn; no "
    "setting removes them from a served version"
)
HYPERVISOR_NOTE: Final = (
    "nvme and store rows: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may "
    "still be warm"
)


@dataclass(frozen=True, slots=True)
class ColdCase:
    """A system and a tier. `prepare` raises PageCacheNotReady; `start` returns the seconds to the first token."""

    tier: str
    system: str
    prepare: Callable[[], object]
    start: Callable[[], float]

    def measure(self) -> float:
        """Prepare the state, then start."""
        self.prepare()
        return self.start()


def measure_round(tally: ResultCollector[float], size_bytes: int, cases: Sequence[ColdCase]) -> None:
    """Measure each case once, in order."""
    for case in cases:
        tally.measure((size_bytes, case.tier, case.system), case.measure)


@dataclass(slots=True)
class KelvinRun:
    """One version of a running installation, started from any tier. Collects the seconds of its stages."""

    kelvin: Installation
    name: str
    size_bytes: int
    chunks: int  # chunks of the version in the NVMe tier
    stages: dict[StageKey, list[float]]

    def ready_on_host(self) -> None:
        """Leave the model in slabs of host memory, with no replica."""
        self.kelvin.client.first_token(self.name, PROMPT)
        self._wait_for_nvme()
        self.kelvin.scale_to_zero(self.name)
        self.kelvin.wait_idle()

    def ready_on_nvme(self) -> None:
        """Leave the model's chunks in NVMe files outside the page cache, and in no faster tier."""
        self._wait_for_nvme()
        self.kelvin.empty_tier("host")
        self.kelvin.wait_idle()
        drop_page_cache(self.kelvin.nvme_files())

    def ready_in_store(self) -> None:
        """Leave the model's chunks in the store, and in no faster tier."""
        for tier in ("host", "nvme"):
            self.kelvin.empty_tier(tier)
        self.kelvin.wait_idle()
        drop_page_cache(self.kelvin.store_files())

    def _wait_for_nvme(self) -> None:
        """Wait until admission to the NVMe tier ends: it would share the disk with the measurement."""
        self.kelvin.wait(lambda: count_nvme_chunks(self.kelvin) == self.chunks, "the NVMe tier holds the version")

    def start(self, tier: str) -> float:
        """Return the seconds to the first token. Then read its timeline, and check which tier the bytes came from."""
        before = _bytes_read(self.kelvin)
        seconds, request_id = self.kelvin.client.start(self.name, PROMPT)
        read = {source for source, total in _bytes_read(self.kelvin).items() if total > before.get(source, 0)}
        if read != {tier} - {"host"}:
            raise InstallationFailed(f"{self.name}: bytes came from {sorted(read)} instead of '{tier}'")
        before_us = 0
        for stamp in self.kelvin.client.request("GET", f"/v1/requests/{request_id}/timeline")["stamps"]:
            key = (self.size_bytes, tier, stamp["stage"])
            self.stages.setdefault(key, []).append((stamp["at_us"] - before_us) / 1e6)
            before_us = stamp["at_us"]
        return seconds


@dataclass(frozen=True, slots=True)
class Baselines:
    """The other systems: resident processes, and the pushed files."""

    directory: Path
    host_floor: Program
    nvme_floor: Program
    resident: Program
    engine: Program

    @property
    def weights(self) -> list[Path]:
        return [self.directory / "model.safetensors"]


def cold_cases(ours: KelvinRun, version: str, baselines: Baselines) -> tuple[ColdCase, ...]:
    """Return the cases of one round."""
    hot, cold = partial(warm_page_cache, baselines.weights), partial(drop_page_cache, baselines.weights)
    resident, fresh = (
        partial(baselines.resident.time_request, PROMPT_IDS),
        lambda: run_from_pretrained(baselines.directory, PROMPT_IDS)[0],
    )
    at_zero = partial(ours.kelvin.scale_to_zero, ours.name)

    def step(probe: bool) -> float:
        answer = baselines.engine.call(tenant=TENANT, version=version, ids=list(PROMPT_IDS), probe=probe)
        return float(answer["seconds"])

    return (
        ColdCase("host", KELVIN, ours.ready_on_host, partial(ours.start, "host")),
        ColdCase("host", FLOOR, _prepare_nothing, partial(baselines.host_floor.time_request, PROMPT_IDS)),
        ColdCase("host", RESIDENT, hot, resident),
        ColdCase("host", FRESH, hot, fresh),
        ColdCase("host", STEP_WITH, at_zero, partial(step, True)),
        ColdCase("host", STEP_WITHOUT, at_zero, partial(step, False)),
        ColdCase("nvme", KELVIN, ours.ready_on_nvme, partial(ours.start, "nvme")),
        ColdCase("nvme", FLOOR, cold, partial(baselines.nvme_floor.time_request, PROMPT_IDS)),
        ColdCase("nvme", RESIDENT, cold, resident),
        ColdCase("nvme", FRESH, cold, fresh),
        ColdCase("store", KELVIN, ours.ready_in_store, partial(ours.start, "store")),
        ColdCase("store", FLOOR, cold, partial(baselines.nvme_floor.time_request, PROMPT_IDS)),
    )


def _prepare_nothing() -> None:
    """Prepare nothing: the bytes are in the process's own memory, or were just read."""


def count_nvme_chunks(kelvin: Installation) -> int:
    """Return the number of chunks in the index of the NVMe tier."""
    return int(kelvin.cache()["nvme"]["chunks"])


def _bytes_read(kelvin: Installation) -> dict[str, int]:
    found: dict[str, int] = kelvin.cache()["bytes_read"]
    return found


@dataclass(frozen=True, slots=True)
class ColdPlan(BenchPlan):
    """Options of `kelvin bench cold`. `known` is called after each size."""

    sizes_bytes: Sequence[int]
    repeats: int
    seed: int = 1


@dataclass(slots=True)
class ColdResults:
    """Results of all sizes so far."""

    tally: ResultCollector[float]  # seconds by size, tier and system
    stages: dict[StageKey, list[float]] = field(default_factory=dict)
    footprints: list[MemoryFootprint] = field(default_factory=list)
    failures: list[MissingFigure] = field(default_factory=list)  # failures other than of rows
    loads: list[float] = field(default_factory=lambda: [load_1m()])

    def record_failure(self, size_bytes: int, what: str, why: object) -> None:
        """Record that this figure is missing at this size."""
        self.failures.append(MissingFigure(what, str(why), size_bytes))

    def figures(self, sizes_bytes: Sequence[int]) -> ColdFigures:
        """Return the figures of these sizes. Missing ones are among the failures."""
        figures = self.tally.figures
        steps = {key: median_of(each).median for key, each in figures.items() if key[2] in (STEP_WITH, STEP_WITHOUT)}
        shares = {
            size: steps[size, "host", STEP_WITH] - steps[size, "host", STEP_WITHOUT]
            for size in sizes_bytes
            if {(size, "host", STEP_WITH), (size, "host", STEP_WITHOUT)} <= set(steps)
        }
        load_note = f"load average from {min(self.loads):.2f} to {max(self.loads):.2f}, once a round"
        return ColdFigures(
            tuple(sizes_bytes),
            without_probe(cold_rows({key: each for key, each in figures.items() if key not in steps}), shares),
            stages_of(self.stages),
            tuple(self.footprints),
            failures=(*self.failures, *self.tally.failures),
            notes=(HYPERVISOR_NOTE, PROBE_NOTE, load_note),
        )


def run(plan: ColdPlan, scratch: Path) -> ColdFigures:
    """Measure all sizes. A size that fails is recorded as a failure."""
    seen = ColdResults(ResultCollector(plan.tell))
    for number, size_bytes in enumerate(plan.sizes_bytes, start=1):
        with scratch_directory(scratch) as place:
            try:
                settings = {"KELVIN_HOST_BYTES": str(size_bytes + size_bytes // 8 + (1 << 30))}
                with running_installation(place / "data", settings=settings) as kelvin:
                    _measure_size(plan, kelvin, place / "model", size_bytes, seen)
            except (ProgramFailed, InstallationFailed) as failed:
                plan.tell(f"{size_bytes / 1e9:g} GB: {failed}")
                seen.record_failure(size_bytes, "the rounds", failed)
        so_far = seen.figures(plan.sizes_bytes[:number])
        plan.tell(table([row for row in so_far.rows if row.size_bytes == size_bytes]))
        plan.known(so_far)
    return seen.figures(plan.sizes_bytes)


def _measure_size(plan: ColdPlan, kelvin: Installation, directory: Path, size_bytes: int, seen: ColdResults) -> None:
    name = f"bench-{size_bytes // 1_000_000}mb"
    plan.tell(f"making and pushing {name}")
    make_model(directory, size_bytes, plan.seed)
    version = kelvin.push(directory, name, replicas=1)
    kelvin.client.first_token(name, PROMPT)  # puts it into the host tier, and soon into the NVMe tier
    kelvin.empty_tier("host")
    ours = KelvinRun(kelvin, name, size_bytes, count_nvme_chunks(kelvin), seen.stages)
    try:
        model_bytes = (directory / "model.safetensors").stat().st_size
        seen.footprints.append(_footprint(kelvin, name, size_bytes, model_bytes))
    except InstallationFailed as failed:
        seen.record_failure(size_bytes, "memory of a start", failed)
    with contextlib.ExitStack() as peers:
        baselines = Baselines(
            directory,
            peers.enter_context(Program("floors.floor", str(directory), "host")),
            peers.enter_context(Program("floors.floor", str(directory), "nvme")),
            peers.enter_context(Program("resident_transformers", str(directory))),
            peers.enter_context(Program("first_step", str(kelvin.data / "run"))),
        )
        cases = cold_cases(ours, version, baselines)
        for turn in range(plan.repeats):
            seen.loads.append(load_1m())
            plan.tell(f"{name}: round {turn + 1} of {plan.repeats}, load {seen.loads[-1]:.2f}")
            measure_round(seen.tally, size_bytes, cases)
    kelvin.scale_to_zero(name)


def _footprint(kelvin: Installation, name: str, size_bytes: int, model_bytes: int) -> MemoryFootprint:
    """Measure the memory of one start from NVMe, which is not timed."""
    kelvin.empty_tier("host")
    kelvin.wait_idle()
    with sampling_runtimes(kelvin.pid) as watch:
        kelvin.client.first_token(name, PROMPT)
        pids = [replica["pid"] for version in kelvin.model(name)["versions"] for replica in version["replicas"]]
    if len(pids) != 1 or (pid := pids[0]) not in watch.before:
        raise InstallationFailed(f"{name}: served by {pids}, not by one parked standby")
    host = kelvin.cache()["host"]
    slabs_bytes = host["slabs_used"] * host["slab_bytes"]
    return MemoryFootprint(size_bytes, model_bytes, slabs_bytes, watch.before[pid], watch.peak[pid])


BENCH: Final = Bench(
    "cold",
    """Time the first token from zero, by tier, next to the floor and to rivals.

    Missing figures are printed with the reason. Exits with 1 if any is missing.
    """,
    (*SIZES, option("--repeats", 15, click.IntRange(1, 1000), "Rounds per size.")),
    with_sizes(ColdPlan),
    run,
    cold_table,
    judge_cold,
    lambda plan, disk, memory: capacity_check.refusal(plan.sizes_bytes, NEED, disk, memory),
    plots.draw_cold,
)
