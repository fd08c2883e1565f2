"""Figures of `kelvin bench cold`: medians next to the floor of the same run, and the claims about them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_most, cell, ratio_or_none
from coldstart_bench.report.order_statistics import median_of

FLOOR, KELVIN, UNPROBED = "floor", "kelvin", "kelvin without its probe"
STAGES_AFTER_FIRST_TOKEN: Final = frozenset({"done"})
MEDIUM_BYTES: Final = 400_000_000  # "0.5 GB" and larger; in smaller models the fixed costs of a start dominate
MAX_RATIO_BY_TIER: Final = {"host": 1.35, "nvme": 1.25}
MAX_TIME_TO_BOUND_S: Final = 0.050
BEYOND_MIB: Final = 256.0


class ColdRow(msgspec.Struct, frozen=True):
    """One system at one size from one tier: seconds from the request to the first token."""

    size_bytes: int
    tier: str
    system: str
    median_s: float
    low_s: float
    high_s: float
    n: int
    ratio_to_floor: float | None  # None if the floor has no figure


StageKey = tuple[int, str, str]  # size in bytes, tier, stage


class StageRow(msgspec.Struct, frozen=True):
    """Median time of one stage of our starts, measured from the end of the previous stage."""

    size_bytes: int
    tier: str
    stage: str
    median_s: float


class MemoryFootprint(msgspec.Struct, frozen=True):
    """Memory of one start in bytes. `parked_bytes` and `peak_bytes` are the runtime's PSS outside slabs."""

    size_bytes: int  # the requested size
    model_bytes: int
    slabs_bytes: int
    parked_bytes: int
    peak_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """Memory beyond the model's own bytes: growth of the process, and unused space of the last slab."""
        return self.peak_bytes - self.parked_bytes + self.slabs_bytes - self.model_bytes


class ColdFigures(Figures, frozen=True):
    """Figures of the requested sizes. A size may have no rows."""

    sizes_bytes: tuple[int, ...]
    rows: tuple[ColdRow, ...]
    stages: tuple[StageRow, ...] = ()
    footprints: tuple[MemoryFootprint, ...] = ()


ColdMeasurements = Mapping[tuple[int, str, str], Sequence[float]]  # (size_bytes, tier, system) -> seconds


def cold_rows(measured: ColdMeasurements) -> tuple[ColdRow, ...]:
    """Return rows sorted by size, tier and median, each with its ratio to the floor of the same size and tier."""
    rows = []
    for (size_bytes, tier, system), seconds in measured.items():
        found, floor = median_of(seconds), measured.get((size_bytes, tier, FLOOR))
        beside = None if floor is None else found.median / median_of(floor).median
        rows.append(ColdRow(size_bytes, tier, system, found.median, found.low, found.high, found.n, beside))
    return _in_order(rows)


def without_probe(rows: Sequence[ColdRow], shares_s: Mapping[int, float]) -> tuple[ColdRow, ...]:
    """Add rows of Kelvin minus the cost of the known answers, for each size that has one in `shares_s`."""
    found = list(rows)
    for row in rows:
        if row.system == KELVIN and (share := shares_s.get(row.size_bytes)) is not None:
            left = (row.median_s - share) / row.median_s
            found.append(
                msgspec.structs.replace(
                    row,
                    system=UNPROBED,
                    median_s=row.median_s - share,
                    low_s=row.low_s - share,
                    high_s=row.high_s - share,
                    ratio_to_floor=None if row.ratio_to_floor is None else row.ratio_to_floor * left,
                )
            )
    return _in_order(found)


def _in_order(rows: Iterable[ColdRow]) -> tuple[ColdRow, ...]:
    return tuple(sorted(rows, key=lambda row: (row.size_bytes, row.tier, row.median_s)))


def stages_of(seconds: Mapping[StageKey, Sequence[float]]) -> tuple[StageRow, ...]:
    """Return the stages in the order of the timeline."""
    return tuple(StageRow(*key, median_of(each).median) for key, each in seconds.items())


def judge_cold(figures: ColdFigures) -> tuple[ClaimVerdict, ...]:
    """Judge first token, time to bound from host memory, and memory of every requested size. No claim decides."""
    ratios = {(row.size_bytes, row.tier): row.ratio_to_floor for row in figures.rows if row.system == KELVIN}
    beyond = {taken.size_bytes: taken.beyond_bytes / (1 << 20) for taken in figures.footprints}
    bound_s = {
        size: time_to_bound_s([row for row in figures.stages if (row.size_bytes, row.tier) == (size, "host")])
        for size in figures.sizes_bytes
    }
    beside, bound = "first token to the floor's, known answers included", "seconds from the request to bound"
    memory = "MiB that a start takes beside the model's bytes"
    return (
        *(
            at_most(beside, ratios.get((size, tier)), limit, tier, size, is_checked=size >= MEDIUM_BYTES, decides=False)
            for size in figures.sizes_bytes
            for tier, limit in MAX_RATIO_BY_TIER.items()
        ),
        *(
            at_most(bound, bound_s[size], MAX_TIME_TO_BOUND_S, "host", size, decides=False)
            for size in figures.sizes_bytes
        ),
        *(at_most(memory, beyond.get(size), BEYOND_MIB, "", size, decides=False) for size in figures.sizes_bytes),
    )


def time_to_bound_s(stages: Sequence[StageRow]) -> float | None:
    """Return the time up to the stage `bound`, of rows of one size and tier. None if no start reached it."""
    names = [row.stage for row in stages]
    return sum(row.median_s for row in stages[: names.index("bound") + 1]) if "bound" in names else None


def stage_table(stages: Sequence[StageRow], rows: Sequence[ColdRow]) -> str:
    """Return where our starts' time went: milliseconds of each stage, and its share of the floor's time. One row per
    stage, two columns per size and tier. Stages after the first token are left out.
    """
    places = sorted({(row.size_bytes, row.tier) for row in stages})
    floors = {(row.size_bytes, row.tier): row.median_s for row in rows if row.system == FLOOR}
    own = {(row.size_bytes, row.tier, row.stage): row.median_s for row in stages}
    lines = [["stage", *(cell for size, tier in places for cell in (f"{size / 1e9:.2f}GB {tier}", ""))]]
    for name in dict.fromkeys(row.stage for row in stages if row.stage not in STAGES_AFTER_FIRST_TOKEN):
        cells = [name]
        for place in places:
            median_s = own.get((*place, name))
            share = ratio_or_none(median_s, floors.get(place))
            cells += [cell(median_s, "{:.1f}ms", times=1e3, none=""), cell(share, "{:.3f}x", none="")]
        lines.append(cells)
    return "\n".join(align(lines))


def table(rows: Sequence[ColdRow]) -> str:
    """Return the rows as an aligned table."""
    lines = [("size", "tier", "system", "median", "95 % interval", "n", "/ floor")]
    for row in rows:
        interval = f"{row.low_s * 1e3:.1f} - {row.high_s * 1e3:.1f}"
        named = f"{row.size_bytes / 1e9:.2f}GB", row.tier, row.system
        beside = cell(row.ratio_to_floor, "{:.2f}x", none="")
        lines.append((*named, f"{row.median_s * 1e3:.1f}ms", interval, str(row.n), beside))
    return "\n".join(align(lines, left=3))


def cold_table(figures: ColdFigures) -> str:
    """Return the rows and the stages of our starts."""
    head = "stages of our starts, and their share of the floor's time:"
    return "\n".join([table(figures.rows), head, stage_table(figures.stages, figures.rows)])
