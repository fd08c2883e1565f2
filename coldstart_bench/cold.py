"""`kelvin bench cold`: first token from zero, over kept-alive TLS, beside the floor and what a user would pick instead.

All systems of a size are measured in turn within one round, so that a noisy neighbour hits all of them. Beside that, of
each size: our start from the store; where a start's time goes, by its timeline; what the known answers cost, by the
engine's first step with them and without; and how much memory a start takes.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from coldstart_bench import footprint, plots, room
from coldstart_bench.cold_cases import (
    PROMPT,
    STEP_WITH,
    STEP_WITHOUT,
    Beside,
    Ours,
    cases_of,
    chunks_on_nvme,
    measure_round,
)
from coldstart_bench.environment import load_1m
from coldstart_bench.frame import SIZES, Bench, BenchPlan, option, with_sizes
from coldstart_bench.installation import Installation, InstallationFailed, running
from coldstart_bench.peers import PeerFailed, make_model
from coldstart_bench.programs import Program
from coldstart_bench.report import Failed
from coldstart_bench.rows import (
    ColdFigures,
    Footprint,
    StageKey,
    cold_table,
    judge_cold,
    rows_of,
    stages_of,
    table,
    without_probe,
)
from coldstart_bench.scratch import scratch_directory
from coldstart_bench.statistics import median_of
from coldstart_bench.tally import Tally

NEED: Final = room.Need(disk_times=4.0, memory_times=4.0)
PROBE_NOTE: Final = (
    "kelvin without its probe: less what known answers add to the engine's first step, both ways in turn; no setting "
    "leaves them out of what is served"
)
HYPERVISOR_NOTE: Final = (
    "nvme and store rows: the guest's page cache is dropped and checked file by file; a hypervisor's own cache may "
    "still be warm"
)


@dataclass(frozen=True, slots=True)
class ColdPlan(BenchPlan):
    """Options of `kelvin bench cold`. `known` is called after each size."""

    sizes_bytes: Sequence[int]
    repeats: int
    seed: int = 1


@dataclass(slots=True)
class Seen:
    """What came of the sizes until now."""

    tally: Tally[float]  # seconds by size, tier and system
    stages: dict[StageKey, list[float]] = field(default_factory=dict)
    footprints: list[Footprint] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)  # of what is no row
    loads: list[float] = field(default_factory=lambda: [load_1m()])

    def fails(self, size_bytes: int, what: str, why: object) -> None:
        """At this size it has no figure."""
        self.failures.append(Failed(what, str(why), size_bytes))

    def found(self, sizes_bytes: Sequence[int]) -> ColdFigures:
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
            without_probe(rows_of({key: each for key, each in figures.items() if key not in steps}), shares),
            stages_of(self.stages),
            tuple(self.footprints),
            failures=(*self.failures, *self.tally.failures),
            notes=(HYPERVISOR_NOTE, PROBE_NOTE, load_note),
        )


def run(plan: ColdPlan, scratch: Path) -> ColdFigures:
    """A size that fails is said to have failed."""
    seen = Seen(Tally(plan.tell))
    for number, size_bytes in enumerate(plan.sizes_bytes, start=1):
        with scratch_directory(scratch) as place:
            try:
                settings = {"KELVIN_HOST_BYTES": str(size_bytes + size_bytes // 8 + (1 << 30))}
                with running(place / "data", settings=settings) as kelvin:
                    _measure_size(plan, kelvin, place / "model", size_bytes, seen)
            except (PeerFailed, InstallationFailed) as failed:
                plan.tell(f"{size_bytes / 1e9:g} GB: {failed}")
                seen.fails(size_bytes, "the rounds", failed)
        so_far = seen.found(plan.sizes_bytes[:number])
        plan.tell(table([row for row in so_far.rows if row.size_bytes == size_bytes]))
        plan.known(so_far)
    return seen.found(plan.sizes_bytes)


def _measure_size(plan: ColdPlan, kelvin: Installation, directory: Path, size_bytes: int, seen: Seen) -> None:
    name = f"bench-{size_bytes // 1_000_000}mb"
    plan.tell(f"making and pushing {name}")
    make_model(directory, size_bytes, plan.seed)
    version = kelvin.push(directory, name)
    kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    kelvin.door.first_token(name, PROMPT)  # the host tier holds it from here on, and the NVMe tier before long
    kelvin.forget("host")
    ours = Ours(kelvin, name, size_bytes, chunks_on_nvme(kelvin), seen.stages)
    try:
        model_bytes = (directory / "model.safetensors").stat().st_size
        seen.footprints.append(_footprint(kelvin, name, size_bytes, model_bytes))
    except InstallationFailed as failed:
        seen.fails(size_bytes, "memory of a start", failed)
    with contextlib.ExitStack() as peers:
        beside = Beside(
            directory,
            peers.enter_context(Program("floor", str(directory), "host")),
            peers.enter_context(Program("floor", str(directory), "nvme")),
            peers.enter_context(Program("resident", str(directory))),
            peers.enter_context(Program("first_step", str(kelvin.data / "run"))),
        )
        cases = cases_of(ours, version, beside)
        for turn in range(plan.repeats):
            seen.loads.append(load_1m())
            plan.tell(f"{name}: round {turn + 1} of {plan.repeats}, load {seen.loads[-1]:.2f}")
            measure_round(seen.tally, size_bytes, cases)
    kelvin.to_zero(name)


def _footprint(kelvin: Installation, name: str, size_bytes: int, model_bytes: int) -> Footprint:
    """Measure the memory of one start from NVMe, which is not timed."""
    kelvin.forget("host")
    kelvin.rest()
    with footprint.watching(kelvin.pid) as watch:
        kelvin.door.first_token(name, PROMPT)
        (pid,) = [replica["pid"] for version in kelvin.model(name)["versions"] for replica in version["replicas"]]
    if pid not in watch.before:
        raise InstallationFailed(f"{name}: process {pid} was no parked standby")
    host = kelvin.admin.request("GET", "/admin/v1/cache")["host"]
    slabs_bytes = host["slabs_used"] * host["slab_bytes"]
    return Footprint(size_bytes, model_bytes, slabs_bytes, watch.before[pid], watch.peak[pid])


BENCH: Final = Bench(
    "cold",
    """First token from zero, by tier, beside the floor and what a user would pick instead.

    What has no figure is printed with the reason, and makes the exit 1.
    """,
    (*SIZES, option("--repeats", 15, click.IntRange(1, 1000), "Rounds per size.")),
    with_sizes(ColdPlan),
    run,
    cold_table,
    judge_cold,
    lambda plan, disk, memory: room.refusal(plan.sizes_bytes, NEED, disk, memory),
    plots.draw_cold,
)
