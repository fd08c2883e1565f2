"""What a flood came to: how long a quiet tenant waited while another one had sent a thousand at once. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from coldstart_bench.report import Figures, Verdict, align, at_least, at_most, cell, recorded_once
from coldstart_bench.statistics import quantile_of
from coldstart_bench.traffic.memory import Memory, words

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


class FloodFigures(Figures, frozen=True):
    """Both tenants', and what the replica saw."""

    slots: int
    slot_s: float
    loud: Waits
    quiet: Waits
    seconds: float  # until the last was answered
    most_inside: int  # at the replica at once
    unrecorded: int  # answers without a usage record; below 0, records without an answer
    lag_p99_s: float | None  # of the open loop itself
    memory: Memory | None


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


def judge(found: FloodFigures) -> tuple[Verdict, ...]:
    """The state is the number of slots."""
    state, slots, quiet = str(found.slots), found.slots, found.quiet
    right = found.loud.right + quiet.right
    waited = None if quiet.queued_p95_s is None else quiet.queued_p95_s / found.slot_s
    busy = right * found.slot_s / slots / found.seconds if found.seconds else None
    return (
        at_most("the quiet tenant's wait in the queue, p95, to one service time", waited, TIMES, state),
        at_most("requests that were not answered right", found.loud.asked + quiet.asked - right, 0, state),
        *recorded_once(found.unrecorded, state),
        at_most("requests at the replica beyond its slots", found.most_inside - slots, 0, state),
        at_least("share of the slots' time that was used", busy, BUSY, state),
    )


def table(found: FloodFigures) -> str:
    """Return the figures as the text that a person reads."""
    rows: list[tuple[str, ...]] = [("tenant", "asked", "right", "queued p50", "p95", "most", "client p95")]
    for waits in (found.loud, found.quiet):
        seen = (waits.queued_p50_s, waits.queued_p95_s, waits.queued_max_s, waits.client_p95_s)
        cells = (cell(each, "{:.1f}ms", times=1e3) for each in seen)
        rows.append((waits.tenant, str(waits.asked), str(waits.right), *cells))
    head = f"{found.slots} slots of {found.slot_s * 1e3:g} ms; all answered after {found.seconds:.2f} s"
    lag = cell(found.lag_p99_s, "{:.1f} ms", times=1e3)
    return "\n".join(
        [head, *align(rows), f"the open loop sent within {lag} of when it was due (p99)", words(found.memory)]
    )
