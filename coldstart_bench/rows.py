"""The result of a run: rows of medians beside the floor of the same run, as JSON and as a table. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from coldstart_bench.statistics import median_of

FLOOR = "floor"


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


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    rows: tuple[Row, ...]
    machine: dict[str, object]
    commit: str | None
    notes: tuple[str, ...] = ()


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


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'size':>8}  {'tier':<5} {'system':<22} {'median':>9}  {'95 % interval':>19}  {'n':>3}  {'/ floor':>7}"]
    for row in rows:
        interval = f"{row.low_s * 1000:8.1f} - {row.high_s * 1000:8.1f}"
        lines.append(
            f"{row.size_bytes / 1e9:6.2f}GB  {row.tier:<5} {row.system:<22} {row.median_s * 1000:7.1f}ms"
            f"  {interval:>19}  {row.n:>3}  {row.ratio_to_floor:6.2f}x"
        )
    return "\n".join(lines)
