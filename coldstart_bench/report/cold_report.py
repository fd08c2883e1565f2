"""The figures of `kelvin bench cold`: medians beside the floor of the same run, and what they have to show. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from coldstart_bench.report.bench_report import ClaimVerdict, Figures, align, at_most, cell, ratio_or_none
from coldstart_bench.report.order_statistics import median_of

FLOOR, KELVIN, UNPROBED = "floor", "kelvin", "kelvin without its probe"
STAGES_AFTER_FIRST_TOKEN: Final = frozenset({"done"})  # stages behind the first token
MEDIUM_BYTES: Final = 400_000_000  # from "0.5 GB" up; below it, what any start costs is most of it
MAX_RATIO_BY_TIER: Final = {"host": 1.35, "nvme": 1.25}
MAX_TIME_TO_BOUND_S: Final = 0.050
BEYOND_MIB: Final = 256.0


class ColdRow(msgspec.Struct, frozen=True):
    """One system at one size from one tier; seconds from the request to the first token."""

    size_bytes: int
    tier: str
    system: str
    median_s: float
    low_s: float
    high_s: float
    n: int
    ratio_to_floor: float | None  # None where the floor has no figure


StageKey = tuple[int, str, str]  # size in bytes, tier, stage


class StageRow(msgspec.Struct, frozen=True):
    """The own time of one stage of our starts, from the end of the one before; its median."""

    size_bytes: int
    tier: str
    stage: str
    median_s: float


class MemoryFootprint(msgspec.Struct, frozen=True):
    """Memory of one start, in bytes: the runtime's PSS outside slabs when it was parked and at its peak."""

    size_bytes: int  # that was asked for
    model_bytes: int
    slabs_bytes: int
    parked_bytes: int
    peak_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """What a start takes beside the model's own bytes: more of its own, and what its last slab has to spare."""
        return self.peak_bytes - self.parked_bytes + self.slabs_bytes - self.model_bytes


class ColdFigures(Figures, frozen=True):
    """Figures of the sizes that were asked for. A size may have no rows."""

    sizes_bytes: tuple[int, ...]
    rows: tuple[ColdRow, ...]
    stages: tuple[StageRow, ...] = ()
    footprints: tuple[MemoryFootprint, ...] = ()


ColdMeasurements = Mapping[tuple[int, str, str], Sequence[float]]  # (size_bytes, tier, system) -> seconds


def cold_rows(measured: ColdMeasurements) -> tuple[ColdRow, ...]:
    """Rows in order of size, tier and median, each beside the floor of its own size and tier, where there is one."""
    rows = []
    for (size_bytes, tier, system), seconds in measured.items():
        found, floor = median_of(seconds), measured.get((size_bytes, tier, FLOOR))
        beside = None if floor is None else found.median / median_of(floor).median
        rows.append(ColdRow(size_bytes, tier, system, found.median, found.low, found.high, found.n, beside))
    return _in_order(rows)


def without_probe(rows: Sequence[ColdRow], shares_s: Mapping[int, float]) -> tuple[ColdRow, ...]:
    """The same, and of each size that has a share and each tier our row less what the known answers cost there."""
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
    """In the order of the timeline."""
    return tuple(StageRow(*key, median_of(each).median) for key, each in seconds.items())


def judge_cold(found: ColdFigures) -> tuple[ClaimVerdict, ...]:
    """First tokens beside the frozen floor, time to bound from memory, and memory, of every size that was asked for;
    none of them decides.
    """
    ratios = {(row.size_bytes, row.tier): row.ratio_to_floor for row in found.rows if row.system == KELVIN}
    beyond = {taken.size_bytes: taken.beyond_bytes / (1 << 20) for taken in found.footprints}
    bound_s = {
        size: time_to_bound_s([row for row in found.stages if (row.size_bytes, row.tier) == (size, "host")])
        for size in found.sizes_bytes
    }
    beside, bound = "first token to the floor's, known answers included", "seconds from the request to bound"
    memory = "MiB that a start takes beside the model's bytes"
    return (
        *(
            at_most(beside, ratios.get((size, tier)), limit, tier, size, asked=size >= MEDIUM_BYTES, decides=False)
            for size in found.sizes_bytes
            for tier, limit in MAX_RATIO_BY_TIER.items()
        ),
        *(
            at_most(bound, bound_s[size], MAX_TIME_TO_BOUND_S, "host", size, decides=False)
            for size in found.sizes_bytes
        ),
        *(at_most(memory, beyond.get(size), BEYOND_MIB, "", size, decides=False) for size in found.sizes_bytes),
    )


def time_to_bound_s(stages: Sequence[StageRow]) -> float | None:
    """The stages up to `bound`, of one size and tier; None where no start had it."""
    names = [row.stage for row in stages]
    return sum(row.median_s for row in stages[: names.index("bound") + 1]) if "bound" in names else None


def stage_table(stages: Sequence[StageRow], rows: Sequence[ColdRow]) -> str:
    """Where our starts' time went, as aligned text: each stage's own milliseconds, and its share of the floor's time.

    A row for each stage, a pair of columns for each size and tier; what came after the first token is left out.
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
    """The rows as aligned text."""
    lines = [("size", "tier", "system", "median", "95 % interval", "n", "/ floor")]
    for row in rows:
        interval = f"{row.low_s * 1e3:.1f} - {row.high_s * 1e3:.1f}"
        named = f"{row.size_bytes / 1e9:.2f}GB", row.tier, row.system
        beside = cell(row.ratio_to_floor, "{:.2f}x", none="")
        lines.append((*named, f"{row.median_s * 1e3:.1f}ms", interval, str(row.n), beside))
    return "\n".join(align(lines, left=3))


def cold_table(found: ColdFigures) -> str:
    """Rows, and where our starts' time went."""
    head = "stages of our starts, and what they are of the floor's time:"
    return "\n".join([table(found.rows), head, stage_table(found.stages, found.rows)])
