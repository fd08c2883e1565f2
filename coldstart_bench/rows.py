"""The result of a run: rows of medians beside the floor of the same run, as JSON and as a table. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from coldstart_bench.failures import Failed
from coldstart_bench.statistics import median_of
from coldstart_bench.verdicts import Verdict

FLOOR, KELVIN, UNPROBED = "floor", "kelvin", "kelvin without its probe"
AFTER: Final = frozenset({"done"})  # stages behind the first token


class Row(msgspec.Struct, frozen=True):
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


class Footprint(msgspec.Struct, frozen=True):
    """Memory of one start, in bytes: the runtime's PSS outside slabs when it was parked and at its peak."""

    model_bytes: int
    slabs_bytes: int
    parked_bytes: int
    peak_bytes: int

    @property
    def beyond_bytes(self) -> int:
        """What a start takes beside the model's own bytes: more of its own, and what its last slab has to spare."""
        return self.peak_bytes - self.parked_bytes + self.slabs_bytes - self.model_bytes


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    rows: tuple[Row, ...]
    machine: dict[str, object]
    commit: str | None
    notes: tuple[str, ...] = ()
    stages: tuple[StageRow, ...] = ()
    footprints: tuple[Footprint, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    failures: tuple[Failed, ...] = ()
    load_before: float = 0.0


Measured = Mapping[tuple[int, str, str], Sequence[float]]  # (size_bytes, tier, system) -> seconds


def rows_of(measured: Measured) -> tuple[Row, ...]:
    """Rows in order of size, tier and median, each beside the floor of its own size and tier, where there is one."""
    rows = []
    for (size_bytes, tier, system), seconds in measured.items():
        found, floor = median_of(seconds), measured.get((size_bytes, tier, FLOOR))
        beside = None if floor is None else found.median / median_of(floor).median
        rows.append(Row(size_bytes, tier, system, found.median, found.low, found.high, found.n, beside))
    return _in_order(rows)


def without_probe(rows: Sequence[Row], shares_s: Mapping[int, float]) -> tuple[Row, ...]:
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


def _in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (row.size_bytes, row.tier, row.median_s)))


def stages_of(seconds: Mapping[StageKey, Sequence[float]]) -> tuple[StageRow, ...]:
    """In the order of the timeline."""
    return tuple(StageRow(*key, median_of(each).median) for key, each in seconds.items())


def stage_table(stages: Sequence[StageRow], rows: Sequence[Row]) -> str:
    """Where our starts' time went, as aligned text: each stage's own milliseconds, and its share of the floor's time.

    A row for each stage, a pair of columns for each size and tier; what came after the first token is left out.
    """
    places = sorted({(row.size_bytes, row.tier) for row in stages})
    floors = {(row.size_bytes, row.tier): row.median_s for row in rows if row.system == FLOOR}
    own = {(row.size_bytes, row.tier, row.stage): row.median_s for row in stages}
    lines = [" " * 12 + "".join(f"  {f'{size / 1e9:.2f}GB {tier}':>19}" for size, tier in places)]
    for name in dict.fromkeys(row.stage for row in stages if row.stage not in AFTER):
        cells = []
        for place in places:
            median_s, floor_s = own.get((*place, name)), floors.get(place)
            shown = "" if median_s is None else f"{median_s * 1000:.1f}ms"
            share = "" if median_s is None or floor_s is None else f"{median_s / floor_s:.3f}x"
            cells.append(f"  {shown:>11} {share:>7}")
        lines.append(f"{name:>12}" + "".join(cells))
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'size':>8}  {'tier':<5} {'system':<24} {'median':>9}  {'95 % interval':>19}  {'n':>3}  {'/ floor':>7}"]
    for row in rows:
        interval = f"{row.low_s * 1000:8.1f} - {row.high_s * 1000:8.1f}"
        ratio = "" if row.ratio_to_floor is None else f"{row.ratio_to_floor:6.2f}x"
        lines.append(
            f"{row.size_bytes / 1e9:6.2f}GB  {row.tier:<5} {row.system:<24} {row.median_s * 1000:7.1f}ms"
            f"  {interval:>19}  {row.n:>3}  {ratio:>7}"
        )
    return "\n".join(lines)
