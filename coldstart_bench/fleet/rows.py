"""What many models cost that nobody asks for: a tick of the scaler, a look-up, a start, and memory. Pure."""

from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, align, at_most, ratio

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


class FleetFigures(Figures, frozen=True):
    """Figures at rising sizes, each with `active` models in use."""

    active: int
    sizes: tuple[Size, ...]


def judge(found: FleetFigures) -> tuple[Verdict, ...]:
    """Of the largest size; a model's memory is what lies between that and the smallest."""
    least, most = found.sizes[0], found.sizes[-1]
    state, between = f"{most.models} models", (most.models - least.models) or None
    control = ratio(most.controlplane_bytes - least.controlplane_bytes, between)
    activator = ratio(most.activator_bytes - least.activator_bytes, between)
    return (
        at_most("longest tick of the scaler, seconds of a core", most.tick_most_s, TICK_S, state),
        at_most("look-up of a model's version, microseconds", most.lookup_s * 1e6, LOOKUP_US, state),
        at_most("start of an activator, seconds", most.activator_start_s, START_S, state),
        at_most("bytes of an idle model at the control plane", control, IDLE_BYTES, state),
        at_most("bytes of an idle model at the activator", activator, IDLE_BYTES, state),
    )


def table(found: FleetFigures) -> str:
    """Return the figures as the text that a person reads."""
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
        for size in found.sizes
    )
    return "\n".join([f"{found.active} models in use", *align([heads, *cells], left=0)])
