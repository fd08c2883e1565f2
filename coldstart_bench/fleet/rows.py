"""What many models cost that nobody asks for: a tick of the scaler, a look-up, a start, and memory. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.verdicts import Verdict, held, line_of

TICK_S: Final = 0.200  # the most, on one core; every two seconds is one
LOOKUP_US: Final = 5.0
START_S: Final = 2.0  # of an activator, with all of the table
IDLE_BYTES: Final = 4096  # of either process, for a model that nobody asks for


class Size(msgspec.Struct, frozen=True):
    """At so many models; seconds of a core but for `activator_start_s`, which is on the clock; bytes are PSS."""

    models: int
    load_s: float  # the registry, from its database
    tick_median_s: float
    tick_most_s: float
    lookup_s: float  # a model's name to its version, for a caller
    key_s: float  # a key to who holds it
    table_s: float  # the feed's first line decoded and taken over
    activator_start_s: float  # from its beginning until it says that it is ready
    controlplane_bytes: int  # of registry and feed
    activator_bytes: int  # of the whole process


class FleetReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    active: int
    sizes: tuple[Size, ...]
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


def judge(sizes: Sequence[Size]) -> tuple[Verdict, ...]:
    """Of the largest size; a model's memory is what lies between that and none."""
    none, most = sizes[0], sizes[-1]
    state = f"{most.models} models"

    def each(grown: int) -> float | None:
        return grown / (most.models - none.models) if most.models > none.models else None

    return (
        held("longest tick of the scaler, seconds of a core", 0, state, most.tick_most_s, TICK_S, at_least=False),
        held("look-up of a model's version, microseconds", 0, state, most.lookup_s * 1e6, LOOKUP_US, at_least=False),
        held("start of an activator, seconds", 0, state, most.activator_start_s, START_S, at_least=False),
        held(
            "bytes of an idle model at the control plane", 0, state,
            each(most.controlplane_bytes - none.controlplane_bytes), IDLE_BYTES, at_least=False,
        ),
        held(
            "bytes of an idle model at the activator", 0, state,
            each(most.activator_bytes - none.activator_bytes), IDLE_BYTES, at_least=False,
        ),
    )  # fmt: skip


def table(report: FleetReport) -> str:
    """Return the report as the text that a person reads."""
    heads = ("models", "tick", "longest", "look-up", "key", "table", "activator", "registry", "c. plane", "activator")
    lines = [f"{report.active} models in use", " ".join(f"{head:>10}" for head in heads)]
    for size in report.sizes:
        cells = (
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
        lines.append(" ".join(f"{cell:>10}" for cell in cells))
    return "\n".join([*lines, *map(line_of, report.verdicts)])
