"""The result of `kelvin bench load`: rows beside the floors of the same run, and failures. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from coldstart_bench.contenders import ALL
from coldstart_bench.failures import Failed, Key, failure_line
from coldstart_bench.statistics import median_of
from coldstart_bench.verdicts import Verdict, line_of

State = Literal["cold", "hot", "host"]
STATES: Final[tuple[str, ...]] = ("cold", "hot", "host")
VERIFYING: Final = frozenset(contender.name for contender in ALL if contender.verifies)


class Take(msgspec.Struct, frozen=True):
    """One load: seconds until the tensors are there, and then until a consumer has read every byte."""

    load_s: float
    consume_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.consume_s


class LoadRow(msgspec.Struct, frozen=True):
    """One loader at one size from one state; medians, and the interval of the total. `floor` rows only read."""

    size_bytes: int
    state: str
    system: str
    verifies: bool
    load_s: float
    consume_s: float
    total_s: float
    low_s: float
    high_s: float
    n: int
    total_to_floor: float | None  # the fastest floor of the same size and state, which has no consumer


class LoadReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    rows: tuple[LoadRow, ...]
    failures: tuple[Failed, ...]
    verdicts: tuple[Verdict, ...]
    device: str
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


Floors = Mapping[Key, Sequence[float]]  # seconds of reads alone


def rows_of(takes: Mapping[Key, Sequence[Take]], floors: Floors) -> tuple[LoadRow, ...]:
    """By size, state and total; floors first."""
    best: dict[tuple[int, str], float] = {}
    for (size, state, _), seconds in floors.items():
        median = median_of(seconds).median
        best[size, state] = min(median, best.get((size, state), median))
    rows = [
        _row(key, [Take(each, 0.0) for each in seconds], best.get(key[:2]), verifies=False)
        for key, seconds in floors.items()
    ]
    rows.sort(key=lambda row: (row.size_bytes, STATES.index(row.state), row.total_s))
    loads = [_row(key, each, best.get(key[:2]), verifies=key[2] in VERIFYING) for key, each in takes.items()]
    loads.sort(key=lambda row: (row.size_bytes, STATES.index(row.state), row.total_s))
    return tuple(
        row
        for size in sorted({row.size_bytes for row in loads})
        for state in STATES
        for row in (*rows, *loads)
        if (row.size_bytes, row.state) == (size, state)
    )


def _row(key: Key, takes: Sequence[Take], floor_s: float | None, *, verifies: bool) -> LoadRow:
    total = median_of([take.total_s for take in takes])
    return LoadRow(
        *key,
        verifies=verifies,
        load_s=median_of([take.load_s for take in takes]).median,
        consume_s=median_of([take.consume_s for take in takes]).median,
        total_s=total.median,
        low_s=total.low,
        high_s=total.high,
        n=total.n,
        total_to_floor=None if floor_s is None else total.median / floor_s,
    )


def is_floor(row: LoadRow) -> bool:
    """Whether it only reads."""
    return row.system.startswith("floor")


def table(report: LoadReport) -> str:
    """Rows, failures and verdicts for people."""
    head = f"{'size':>8}  {'state':<5} {'loader':<28} {'checks':<6} {'load':>9} {'consume':>9} {'total':>9}"
    lines = [f"{head}  {'95 % interval':>19} {'GB/s':>6} {'n':>3}  {'/ floor':>7}"]
    for row in report.rows:
        interval = f"{row.low_s * 1e3:8.1f} - {row.high_s * 1e3:8.1f}"
        ratio = "" if row.total_to_floor is None else f"{row.total_to_floor:6.2f}x"
        lines.append(
            f"{row.size_bytes / 1e9:6.2f}GB  {row.state:<5} {row.system:<28} {'yes' if row.verifies else '-':<6}"
            f" {row.load_s * 1e3:7.1f}ms {row.consume_s * 1e3:7.1f}ms {row.total_s * 1e3:7.1f}ms  {interval:>19}"
            f" {row.size_bytes / row.total_s / 1e9:6.2f} {row.n:>3}  {ratio:>7}"
        )
    lines += [failure_line(failed) for failed in report.failures]
    lines += [line_of(verdict) for verdict in report.verdicts]
    return "\n".join(lines)
