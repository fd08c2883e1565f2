"""Decide which usage records enter the ledger, and which of several records of a request is charged.

The decision depends on the set of records alone, not on the order of their arrival.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord

MAX_VALUE: Final = 2**53  # microseconds: 285 years; a larger one is damage, and sums must fit 64 bits

# Lengths of the ledger's columns. A longer text is damage, because Kelvin writes none.
REQUEST_TEXT_LENGTHS: Final = {
    "request_id": 128, "source": 128, "tenant": 63, "model": 127, "version": 64, "key_id": 64, "runtime_id": 128,
    "outcome": 64, "once": 64, "degraded": 160,
}  # fmt: skip
LIFETIME_TEXT_LENGTHS: Final = {
    "runtime_id": 128, "source": 128, "tenant": 63, "model": 63, "version": 64, "device_class": 64,
}  # fmt: skip
_INT32_FIELDS: Final = ("status", "pid", "exit_status")
_MAX_INT32: Final = 2**31 - 1

_REQUEST_COUNTERS: Final = (
    "sequence", "started_at_us", "ended_at_us", "queued_us", "prompt_tokens", "cached_tokens", "completion_tokens",
    "device_us",
)  # fmt: skip
_LIFETIME_COUNTERS: Final = (
    "sequence", "born_at_us", "died_at_us", "total_us", "standby_us", "restore_us", "active_us", "idle_us", "requests",
    "cpu_us", "max_rss_kb",
)  # fmt: skip


class RecordStatus(Enum):
    """Decisions without a reason."""

    NEW = auto()
    DUPLICATE = auto()


@dataclass(frozen=True, slots=True)
class RecordConflict:
    """The record is kept aside, where people see it: two different records were written under one name."""

    reason: str


RecordDecision = RecordStatus | RecordConflict


def decide_request_record(
    known: Sequence[RequestRecord], record: RequestRecord, *, sequence_taken: bool
) -> RecordDecision:
    """Decide whether a request record is entered. `known` are the ledger's records of the same tenant and request id.

    One record by an activator, and one by each runtime that lost its activator, may coexist.
    """
    if record in known:
        return RecordStatus.DUPLICATE
    if flaw := _find_flaw(record, _REQUEST_COUNTERS, REQUEST_TEXT_LENGTHS):
        return RecordConflict(flaw)
    if record.cached_tokens > record.prompt_tokens:
        return RecordConflict(f"{record.cached_tokens} cached of {record.prompt_tokens} prompt tokens")
    if record.sequence < 1:
        return RecordConflict(f"sequence {record.sequence}")
    if any(_writer_key(other) == _writer_key(record) for other in known):
        return RecordConflict("another record of this request by the same kind of writer says something else")
    if sequence_taken:
        return RecordConflict("its source used this sequence for another record")
    return RecordStatus.NEW


def decide_lifetime_record(
    known: LifetimeRecord | None, record: LifetimeRecord, *, sequence_taken: bool
) -> RecordDecision:
    """Decide whether a lifetime record is entered. `known` is the ledger's record of the same runtime."""
    if known == record:
        return RecordStatus.DUPLICATE
    if flaw := _find_flaw(record, _LIFETIME_COUNTERS, LIFETIME_TEXT_LENGTHS):
        return RecordConflict(flaw)
    if record.sequence < 1:
        return RecordConflict(f"sequence {record.sequence}")
    if known is not None:
        return RecordConflict("another record of this runtime says something else")
    if sequence_taken:
        return RecordConflict("its source used this sequence for another record")
    return RecordStatus.NEW


def choose_charged_record(known: Sequence[RequestRecord]) -> RequestRecord:
    """Return the charged record: the activator's, else the orphan record that delivered most."""
    return max(
        known,
        key=lambda record: (
            record.origin is RecordOrigin.ACTIVATOR,
            record.completion_tokens,
            record.ended_at_us,
            record.source,
            record.sequence,
        ),
    )


def _writer_key(record: RequestRecord) -> tuple[RecordOrigin, str | None]:
    return record.origin, record.runtime_id if record.origin is RecordOrigin.ORPHAN else None


def _find_flaw(record: RequestRecord | LifetimeRecord, figures: Sequence[str], words: Mapping[str, int]) -> str | None:
    if record.tenant == "":  # the name of the platform's own chain
        return "tenant is empty"
    for name in figures:
        value = getattr(record, name)
        if not 0 <= value <= MAX_VALUE:
            return f"{name} is {value}"
    for name in _INT32_FIELDS:
        if not -_MAX_INT32 <= getattr(record, name, 0) <= _MAX_INT32:
            return f"{name} is {getattr(record, name)}"
    for name, max_length in words.items():
        word = getattr(record, name)
        if word and len(word) > max_length:
            return f"{name} has {len(word)} characters"
    return None
