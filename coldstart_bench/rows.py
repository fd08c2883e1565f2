"""The result of a run: rows of medians beside the floor of the same run, as JSON and as a table. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from coldstart_bench.statistics import median_of
from coldstart_bench.verdicts import Verdict

FLOOR, KELVIN, UNPROBED = "floor", "kelvin", "kelvin without its probe"


class Row(msgspec.Struct, frozen=True):
    """One system at one size from one tier; seconds from the request to the first token."""

    size_bytes: int
    tier: str
    system: str
    median_s: float
    low_s: float
    high_s: float
    n: int
    ratio_to_floor: float


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
    load_before: float = 0.0


Measured = Mapping[tuple[int, str, str], Sequence[float]]  # (size_bytes, tier, system) -> seconds


def rows_of(measured: Measured) -> tuple[Row, ...]:
    """Rows in order of size, tier and ratio. Raises KeyError where a floor was not measured beside its rows."""
    rows = []
    for (size_bytes, tier, system), seconds in measured.items():
        found = median_of(seconds)
        floor = median_of(measured[size_bytes, tier, FLOOR]).median
        rows.append(
            Row(size_bytes, tier, system, found.median, found.low, found.high, found.n, found.median / floor),
        )
    return tuple(sorted(rows, key=lambda row: (row.size_bytes, row.tier, row.ratio_to_floor)))


def without_probe(rows: Sequence[Row], shares_s: Mapping[int, float]) -> tuple[Row, ...]:
    """The same, and of each size and tier our row less what the known answers cost there."""
    found = list(rows)
    for row in rows:
        if row.system == KELVIN:
            share, floor_s = shares_s[row.size_bytes], row.median_s / row.ratio_to_floor
            median_s = row.median_s - share
            found.append(
                msgspec.structs.replace(
                    row,
                    system=UNPROBED,
                    median_s=median_s,
                    low_s=row.low_s - share,
                    high_s=row.high_s - share,
                    ratio_to_floor=median_s / floor_s,
                )
            )
    return tuple(sorted(found, key=lambda row: (row.size_bytes, row.tier, row.ratio_to_floor)))


def stages_of(seconds: Mapping[StageKey, Sequence[float]]) -> tuple[StageRow, ...]:
    """In the order of the timeline."""
    return tuple(StageRow(*key, median_of(each).median) for key, each in seconds.items())


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'size':>8}  {'tier':<5} {'system':<24} {'median':>9}  {'95 % interval':>19}  {'n':>3}  {'/ floor':>7}"]
    for row in rows:
        interval = f"{row.low_s * 1000:8.1f} - {row.high_s * 1000:8.1f}"
        lines.append(
            f"{row.size_bytes / 1e9:6.2f}GB  {row.tier:<5} {row.system:<24} {row.median_s * 1000:7.1f}ms"
            f"  {interval:>19}  {row.n:>3}  {row.ratio_to_floor:6.2f}x"
        )
    return "\n".join(lines)
