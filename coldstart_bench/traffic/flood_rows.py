"""What a flood came to: how long a quiet tenant waited while another one had sent a thousand at once. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.memory import Memory, words
from coldstart_bench.verdicts import Verdict, held, line_of, recorded_once

TIMES: Final = 1.0  # of a service, that the quiet one may wait
BUSY: Final = 0.90  # of the slots, while there is more to do than they can


class Waits(msgspec.Struct, frozen=True):
    """Of one tenant: seconds in the queue as recorded, and what its client saw from when each was due."""

    tenant: str
    asked: int
    right: int
    queued_p50_s: float | None
    queued_p95_s: float | None
    queued_max_s: float | None
    client_p95_s: float | None  # beyond one service time


class FloodReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    slots: int
    slot_s: float
    loud: Waits
    quiet: Waits
    seconds: float  # until the last was answered
    most_inside: int  # at the replica at once
    unrecorded: int  # answers without a usage record; below 0, records without an answer
    lag_p99_s: float | None  # of the open loop itself
    memory: Memory | None
    verdicts: tuple[Verdict, ...]
    machine: dict[str, object]
    load_before: float
    commit: str | None
    notes: tuple[str, ...] = ()


def waits_of(tenant: str, asked: int, right: int, queued_s: Sequence[float], beyond_s: Sequence[float]) -> Waits:
    """From what was recorded, and from what its client saw."""
    return Waits(
        tenant,
        asked,
        right,
        quantile_of(queued_s, 0.5),
        quantile_of(queued_s, 0.95),
        quantile_of(queued_s, 1.0),
        quantile_of(beyond_s, 0.95),
    )


def judge(
    slots: int, slot_s: float, loud: Waits, quiet: Waits, seconds: float, most_inside: int, unrecorded: int
) -> tuple[Verdict, ...]:
    """Whether it holds or not; the state is the number of slots."""
    state = str(slots)
    waited = None if quiet.queued_p95_s is None else quiet.queued_p95_s / slot_s
    wrong = loud.asked + quiet.asked - loud.right - quiet.right
    busy = (loud.right + quiet.right) * slot_s / slots / seconds if seconds else None
    return (
        held("the quiet tenant's wait in the queue, p95, to one service time", 0, state, waited, TIMES, at_least=False),
        held("requests that were not answered right", 0, state, float(wrong), 0.0, at_least=False),
        *recorded_once(unrecorded, state),
        held("requests at the replica beyond its slots", 0, state, float(most_inside - slots), 0.0, at_least=False),
        held("share of the slots' time that was used", 0, state, busy, BUSY, at_least=True),
    )  # fmt: skip


def table(report: FloodReport) -> str:
    """Return the report as the text that a person reads."""
    lines = [
        f"{report.slots} slots of {report.slot_s * 1e3:g} ms; all answered after {report.seconds:.2f} s",
        f"{'tenant':<8} {'asked':>6} {'right':>6} {'queued p50':>11} {'p95':>10} {'most':>10} {'client p95':>11}",
    ]
    for waits in (report.loud, report.quiet):
        seen = (waits.queued_p50_s, waits.queued_p95_s, waits.queued_max_s, waits.client_p95_s)
        cells = ["-" if each is None else f"{each * 1e3:.1f}ms" for each in seen]
        lines.append(
            f"{waits.tenant:<8} {waits.asked:>6} {waits.right:>6} "
            f"{cells[0]:>11} {cells[1]:>10} {cells[2]:>10} {cells[3]:>11}"
        )
    if report.lag_p99_s is not None:
        lines.append(f"the open loop sent within {report.lag_p99_s * 1e3:.1f} ms of when it was due (p99)")
    return "\n".join([*lines, words(report.memory), *map(line_of, report.verdicts)])
