"""Which usage record enters the ledger, and which of several about one request is the one that is charged.

The answer depends on the set of records alone, not on the order in which they arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from contracts.usage import LifetimeRecord, Origin, RequestRecord

MAX_FIGURE: Final = 2**53  # microseconds: 285 years; a larger one is damage, and sums must fit 64 bits

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
    if flaw := _impossible(record, _REQUEST_FIGURES):
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
    if flaw := _impossible(record, _LIFETIME_FIGURES):
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


def _impossible(record: RequestRecord | LifetimeRecord, figures: Sequence[str]) -> str | None:
    for name in figures:
        value = getattr(record, name)
        if not 0 <= value <= MAX_FIGURE:
            return f"{name} is {value}"
    return None
