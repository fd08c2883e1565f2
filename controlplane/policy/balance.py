"""Find what does not add up in the ledger: lost records, double ones, time that nobody accounts for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from contracts.billing import Imbalance

TOLERANCE_US: Final = 100_000
TOLERANCE_PERCENT: Final = 1
SETTLE_US: Final = 60_000_000  # between a death and its record

Range = tuple[int, int]  # first and last sequence, both included


class Kind(StrEnum):
    """What can be wrong."""

    SEQUENCE_HOLE = "sequence_hole"
    REQUESTS_MISSING = "requests_missing"
    REQUESTS_EXTRA = "requests_extra"
    TIME_UNACCOUNTED = "time_unaccounted"
    DEVICE_TIME_OVER = "device_time_over"
    LIFETIME_MISSING = "lifetime_missing"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class LifetimeFacts:
    """A replica's record beside what the ledger has of its requests."""

    runtime_id: str
    total_us: int
    standby_us: int
    restore_us: int
    active_us: int
    idle_us: int
    requests: int  # that it says must exist
    recorded_requests: int  # that exist
    answered_requests: int  # of these, that cost device time or delivered tokens
    recorded_device_us: int
    is_cut: bool = False  # its end was never told: its figures are those of its last word


def tolerance_us(total_us: int) -> int:
    """1 % or 100 ms, whichever is more."""
    return max(TOLERANCE_US, total_us * TOLERANCE_PERCENT // 100)


def lifetime_problems(facts: LifetimeFacts) -> Iterator[Imbalance]:
    """The runtime's own four parts against the supervisor's total; its requests against those in the ledger."""
    parts_us = facts.standby_us + facts.restore_us + facts.active_us + facts.idle_us
    allowed_us = tolerance_us(facts.total_us)
    if abs(parts_us - facts.total_us) > allowed_us:
        yield _problem(
            Kind.TIME_UNACCOUNTED,
            facts.runtime_id,
            f"standby, restore, active and idle are {parts_us} us; it lived {facts.total_us} us",
        )
    if facts.recorded_device_us > facts.active_us + allowed_us and not facts.is_cut:
        yield _problem(
            Kind.DEVICE_TIME_OVER,
            facts.runtime_id,
            f"its requests used {facts.recorded_device_us} us of device time; it was active for {facts.active_us} us",
        )
    if facts.recorded_requests < facts.requests:
        yield _problem(
            Kind.REQUESTS_MISSING,
            facts.runtime_id,
            f"it served {facts.requests} requests; {facts.recorded_requests} request records name it",
        )
    # A record that cost nothing may name a replica that never saw the request: its caller left on the way there.
    if facts.answered_requests > facts.requests and not facts.is_cut:
        yield _problem(
            Kind.REQUESTS_EXTRA,
            facts.runtime_id,
            f"it served {facts.requests} requests; {facts.answered_requests} request records have its answers",
        )


def holes(source: str, received: Sequence[Range]) -> Iterator[Imbalance]:
    """Records that `source` wrote and that never arrived: sequences are gapless from 1. `received` is normal."""
    expected = 1
    for first, last in received:
        if first > expected:
            which = f"record {expected}" if first == expected + 1 else f"records {expected} to {first - 1}"
            yield _problem(Kind.SEQUENCE_HOLE, source, f"{which} of this source never arrived; record {first} did")
        expected = last + 1


def missing_lifetime(runtime_id: str, requests: int) -> Imbalance:
    """A replica that is not alive, whose death nobody recorded."""
    return _problem(
        Kind.LIFETIME_MISSING, runtime_id, f"{requests} request records name it; it has no lifetime record and is gone"
    )


def conflict(subject: str, reason: str) -> Imbalance:
    """A record that was not entered."""
    return _problem(Kind.CONFLICT, subject, reason)


def add_to_ranges(received: Sequence[Range], sequences: Iterable[int]) -> list[Range]:
    """Normal form: ascending, disjoint, never adjacent. `received` is normal; `sequences` are any."""
    merged: list[Range] = []
    for first, last in sorted([*received, *((sequence, sequence) for sequence in set(sequences))]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def covers(received: Sequence[Range], sequence: int) -> bool:
    """Whether it arrived."""
    return any(first <= sequence <= last for first, last in received)


def _problem(kind: Kind, subject: str, detail: str) -> Imbalance:
    return Imbalance(kind=kind, subject=subject, detail=detail)
