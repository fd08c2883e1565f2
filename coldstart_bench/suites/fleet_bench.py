"""`kelvin bench fleet`: measure the cost of ten thousand models at one control plane and one activator, few in use."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from coldstart_bench.harness.activator_testbed import UpstreamConfig, running_upstream
from coldstart_bench.harness.installation import free_port
from coldstart_bench.harness.process_stats import pss_of
from coldstart_bench.harness.program_runner import Program, ProgramFailed
from coldstart_bench.harness.service_runner import running_activator_process
from coldstart_bench.harness.synthetic_fleet import EACH, fleet_feed
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_most, ratio_or_none
from coldstart_bench.report.order_statistics import median_of
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option

TICK_S: Final = 0.200  # the most CPU time of a tick; there is a tick every two seconds
LOOKUP_US: Final = 5.0
START_S: Final = 2.0  # the longest start of an activator, with the whole table
IDLE_BYTES: Final = 4096  # the most memory for an idle model, in each process
LOOKUPS: Final = 20_000
REPLICAS_NOTE: Final = "replicas are only counted; ticks run in virtual time, and their CPU time is measured"


class FleetSize(msgspec.Struct, frozen=True):
    """Figures at one size: CPU seconds, except `activator_start_s`, which is wall time; bytes are PSS."""

    models: int
    load_s: float  # loading the registry from its database
    tick_median_s: float
    tick_most_s: float
    lookup_s: float  # from a model's name to its version, for a caller
    key_s: float  # from an API key to its principal
    table_s: float  # decoding and applying the feed's first line
    activator_start_s: float  # from its start until it is ready
    controlplane_bytes: int  # registry and feed
    activator_bytes: int  # the whole process


class FleetFigures(Figures, frozen=True):
    """Figures at rising sizes, each with `active` models in use."""

    active: int
    sizes: tuple[FleetSize, ...]


def judge(figures: FleetFigures) -> tuple[ClaimVerdict, ...]:
    """Judge the largest size. Memory per model is its difference from the smallest size."""
    least, most = figures.sizes[0], figures.sizes[-1]
    state, between = f"{most.models} models", (most.models - least.models) or None
    control = ratio_or_none(most.controlplane_bytes - least.controlplane_bytes, between)
    door = ratio_or_none(most.activator_bytes - least.activator_bytes, between)
    return (
        at_most("longest tick of the scaler, seconds of a core", most.tick_most_s, TICK_S, state),
        at_most("look-up of a model's version, microseconds", most.lookup_s * 1e6, LOOKUP_US, state),
        at_most("start of an activator, seconds", most.activator_start_s, START_S, state),
        at_most("bytes of an idle model at the control plane", control, IDLE_BYTES, state),
        at_most("bytes of an idle model at the activator", door, IDLE_BYTES, state),
    )


def table(figures: FleetFigures) -> str:
    """Return the figures as an aligned table."""
    heads = ("models", "tick", "longest", "look-up", "key", "table", "activator", "registry", "c. plane", "activator")
    cells = (
        (
            f"{size.models:,}",
            f"{size.tick_median_s * 1e3:.2f}ms",
            f"{size.tick_most_s * 1e3:.2f}ms",
            f"{size.lookup_s * 1e6:.2f}us",
            f"{size.key_s * 1e6:.2f}us",
            f"{size.table_s * 1e3:.0f}ms",
            f"{size.activator_start_s:.2f}s",
            f"{size.load_s:.2f}s",
            f"{size.controlplane_bytes / 2**20:.1f}MiB",
            f"{size.activator_bytes / 2**20:.1f}MiB",
        )
        for size in figures.sizes
    )
    return "\n".join([f"{figures.active} models in use", *align([heads, *cells], left=0)])


@dataclass(frozen=True, slots=True)
class FleetPlan(BenchPlan):
    """Options of `kelvin bench fleet`: sizes in rising order."""

    sizes: tuple[int, ...]
    active: int
    ticks: int


def sizes_of(text: str) -> tuple[int, ...]:
    """Parse numbers of models separated by commas and sort them. Raises ValueError with the rule."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ValueError(f"{text!r}: must be whole numbers separated by commas") from None
    if len(sizes) < 2 or not 1 <= sizes[0] <= sizes[-1] <= 1000 * EACH:
        raise ValueError(f"{text!r}: must be two or more from 1 to {1000 * EACH}")
    return tuple(sizes)


def run(plan: FleetPlan, scratch: Path) -> FleetFigures:
    """Measure all sizes. Raises InstallationFailed, ProgramFailed."""
    sizes = []
    for models in plan.sizes:
        sizes.append(_measured(plan, scratch, models))
        plan.tell(f"{models:,} models measured")
    return FleetFigures(plan.active, tuple(sizes), notes=(REPLICAS_NOTE,))


def _measured(plan: FleetPlan, scratch: Path, models: int) -> FleetSize:
    database = str(scratch / "kelvin.db")
    with Program("fleet_registry", database) as registry:
        registry.call(fill=models)
    with Program("fleet_registry", database) as registry:  # a new process, without the memory of filling
        scaled = registry.call(active=min(plan.active, models), ticks=plan.ticks)
    if scaled["decided"] != min(plan.active, models):
        raise ProgramFailed(f"of {min(plan.active, models)} models in use the scaler decided {scaled['decided']}")
    with Program("fleet_route") as route:
        routed = route.call(models=models, lookups=LOOKUPS)
    start_s, activator_bytes = _activator(scratch / f"of-{models}", models)
    return FleetSize(
        models=scaled["models"],
        load_s=scaled["load_s"],
        tick_median_s=median_of(scaled["ticks_s"]).median,
        tick_most_s=max(scaled["ticks_s"]),
        lookup_s=routed["lookup_s"],
        key_s=routed["key_s"],
        table_s=routed["table_s"],
        activator_start_s=start_s,
        controlplane_bytes=scaled["bytes"],
        activator_bytes=activator_bytes,
    )


def _activator(scratch: Path, models: int) -> tuple[float, int]:
    """Return the seconds until an activator is ready for clients, and its memory then."""
    scratch.mkdir()
    with running_upstream(scratch, UpstreamConfig(fleet_feed(models))):
        began = time.perf_counter()
        with running_activator_process(scratch / "data", free_port()) as pid:
            return time.perf_counter() - began, pss_of(pid)


BENCH: Final = Bench(
    "fleet",
    """Measure a tick, a lookup, a start and an idle model's memory with many models, few of them in use.
    Exits with 1 if a claim fails.""",
    (
        option("--sizes", "100,1000,3000,10000", str, "Numbers of models, separated by commas.", convert=sizes_of),
        option("--active", 200, click.IntRange(1, 100_000), "How many of the models are in use."),
        option("--ticks", 30, click.IntRange(1, 10_000), "Ticks of the autoscaler."),
    ),
    FleetPlan,
    run,
    table,
    judge,
)
