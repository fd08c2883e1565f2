"""Which usage record enters the ledger, and which of several about one request is the one that is charged.

The answer depends on the set of records alone, not on the order in which they arrive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from contracts.usage import LifetimeRecord, Origin, RequestRecord

MAX_FIGURE: Final = 2**53  # microseconds: 285 years; a larger one is damage, and sums must fit 64 bits

# What a column of the ledger holds; a longer word is damage, as nothing here writes one.
REQUEST_WORDS: Final = {
    "request_id": 128, "source": 128, "tenant": 63, "model": 127, "version": 64, "key_id": 64, "runtime_id": 128,
    "outcome": 64, "once": 64, "degraded": 160,
}  # fmt: skip
LIFETIME_WORDS: Final = {
    "runtime_id": 128, "source": 128, "tenant": 63, "model": 63, "version": 64, "device_class": 64,
}  # fmt: skip
_SMALL: Final = ("status", "pid", "exit_status")  # of 32 bits
_MAX_SMALL: Final = 2**31 - 1

_REQUEST_FIGURES: Final = (
    "sequence", "started_at_us", "ended_at_us", "queued_us", "prompt_tokens", "cached_tokens", "completion_tokens",
    "device_us",
)  # fmt: skip
_LIFETIME_FIGURES: Final = (
    "sequence", "born_at_us", "died_at_us", "total_us", "standby_us", "restore_us", "active_us", "idle_us", "requests",
    "cpu_us", "max_rss_kb",
)  # fmt: skip


class Known(Enum):
    """Outcomes without a reason."""

    NEW = auto()
    DUPLICATE = auto()


@dataclass(frozen=True, slots=True)
class Conflict:
    """Not entered, but kept where people see it: something wrote two different records under one name."""

    reason: str


Placement = Known | Conflict


def place_request(known: Sequence[RequestRecord], record: RequestRecord, *, sequence_taken: bool) -> Placement:
    """`known` are the ledger's records of the same tenant and request id.

    One record by an activator, and one by each runtime that lost its activator, may stand side by side.
    """
    if record in known:
        return Known.DUPLICATE
    if flaw := _impossible(record, _REQUEST_FIGURES, REQUEST_WORDS):
        return Conflict(flaw)
    if record.cached_tokens > record.prompt_tokens:
        return Conflict(f"{record.cached_tokens} cached of {record.prompt_tokens} prompt tokens")
    if record.sequence < 1:
        return Conflict(f"sequence {record.sequence}")
    if any(_slot(other) == _slot(record) for other in known):
        return Conflict("another record of this request by the same kind of writer says something else")
    if sequence_taken:
        return Conflict("its source used this sequence for another record")
    return Known.NEW


def place_lifetime(known: LifetimeRecord | None, record: LifetimeRecord, *, sequence_taken: bool) -> Placement:
    """`known` is the ledger's record of the same runtime."""
    if known == record:
        return Known.DUPLICATE
    if flaw := _impossible(record, _LIFETIME_FIGURES, LIFETIME_WORDS):
        return Conflict(flaw)
    if record.sequence < 1:
        return Conflict(f"sequence {record.sequence}")
    if known is not None:
        return Conflict("another record of this runtime says something else")
    if sequence_taken:
        return Conflict("its source used this sequence for another record")
    return Known.NEW


def standing(known: Sequence[RequestRecord]) -> RequestRecord:
    """The one that is charged: the activator's; else, of the orphans', the one that delivered most."""
    return max(
        known,
        key=lambda record: (
            record.origin is Origin.ACTIVATOR,
            record.completion_tokens,
            record.ended_at_us,
            record.source,
            record.sequence,
        ),
    )


def _slot(record: RequestRecord) -> tuple[Origin, str | None]:
    return record.origin, record.runtime_id if record.origin is Origin.ORPHAN else None


def _impossible(record: RequestRecord | LifetimeRecord, figures: Sequence[str], words: Mapping[str, int]) -> str | None:
    if record.tenant == "":  # the name of the platform's own chain
        return "tenant is empty"
    for name in figures:
        value = getattr(record, name)
        if not 0 <= value <= MAX_FIGURE:
            return f"{name} is {value}"
    for name in _SMALL:
        if not -_MAX_SMALL <= getattr(record, name, 0) <= _MAX_SMALL:
            return f"{name} is {getattr(record, name)}"
    for name, most in words.items():
        word = getattr(record, name)
        if word and len(word) > most:
            return f"{name} has {len(word)} characters"
    return None
