"""The accounts of a month as the ledger holds them: replicas, sources, orphans, records kept aside. Rows are streamed.

`billing` asks whether they are whole, `reconcile` what differs and how much that is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, Cast, Column, Connection, Select, and_, cast, func, or_, select

from contracts.usage import CUT, Origin
from controlplane.ledger_schema import (
    conflicts,
    lifetime_records,
    open_lives,
    owned_by,
    received,
    request_records,
    runtime_totals,
    sources,
)
from controlplane.policy.balance import LifetimeFacts, Range
from controlplane.store import streamed

_ROWS: Final = 500  # fetched at a time


@dataclass(frozen=True, slots=True)
class OpenRuntime:
    """One that served and has no lifetime record."""

    runtime_id: str
    requests: int
    device_us: int
    last_us: int  # end of its last request
    told_us: int | None = None  # its last word of its life so far, by our clock; None where it says none


@dataclass(frozen=True, slots=True)
class Life:
    """A replica whose death is booked, beside all its requests, whenever they ended."""

    facts: LifetimeFacts
    model: str
    version: str | None
    device_class: str
    died_at_us: int
    exit_status: int


@dataclass(frozen=True, slots=True)
class KeptAside:
    """A record that was not entered: `record` is its JSON."""

    subject: str
    reason: str
    at_us: int
    record: str


@dataclass(frozen=True, slots=True)
class Orphan:
    """A request whose activator left no record."""

    request_id: str
    runtime_id: str
    ended_at_us: int
    completion_tokens: int  # that were acknowledged


def open_runtimes(connection: Connection, tenant: str, begin_us: int, end_us: int) -> list[OpenRuntime]:
    """The tenant's own that served around the month, whoever asked."""
    c, died, told = runtime_totals.c, lifetime_records.c, open_lives.c
    figures = (_sum(c.requests), _sum(c.device_us), func.max(c.last_at_us), func.max(told.told_at_us))
    query = (
        select(c.runtime_id, *figures)
        .join(open_lives, told.runtime_id == c.runtime_id, isouter=True)
        .where(or_(and_(c.tenant == tenant, c.owner.is_(None)), c.owner == tenant))
        .where(c.last_at_us >= begin_us, c.first_at_us < end_us)
        .where(~select(died.runtime_id).where(died.runtime_id == c.runtime_id).exists())
        .group_by(c.runtime_id)
        .order_by(c.runtime_id)
    )
    return [OpenRuntime(*row) for row in connection.execute(query)]


def _sum(figures: Column[Any]) -> Cast[int]:
    """A whole number: PostgreSQL's sums of these are decimals."""
    return cast(func.sum(figures), BigInteger)


def received_ranges(connection: Connection, begin_us: int, end_us: int) -> Iterator[tuple[str, list[Range]]]:
    """What arrived of each source that recorded anything in the month: a lost record may have been anybody's."""
    query = (
        select(received.c.source, received.c.first, received.c.last)
        .join(sources, sources.c.source == received.c.source)
        .where(sources.c.first_at_us < end_us, sources.c.last_at_us >= begin_us)
        .order_by(received.c.source, received.c.first)
    )
    name, ranges = None, list[Range]()
    for source, first, last in streamed(connection, query, _ROWS):
        if source != name:
            if name is not None:
                yield name, ranges
            name, ranges = source, []
        ranges.append((first, last))
    if name is not None:
        yield name, ranges


def lives(connection: Connection, tenant: str, month: str) -> Iterator[Life]:
    """Replicas of the tenant that died in the month, beside the requests of all who may call them."""
    uses, died = runtime_totals.c, lifetime_records.c
    query: Select[Any] = (
        select(
            died.runtime_id,
            died.total_us,
            died.standby_us,
            died.restore_us,
            died.active_us,
            died.idle_us,
            died.requests,
            func.coalesce(_sum(uses.requests), 0),
            func.coalesce(_sum(uses.answered), 0),
            func.coalesce(_sum(uses.device_us), 0),
            died.source.startswith(CUT),
            func.coalesce(died.model, ""),
            died.version,
            died.device_class,
            died.died_at_us,
            died.exit_status,
        )
        .join(runtime_totals, uses.runtime_id == died.runtime_id, isouter=True)
        .where(died.tenant == tenant, died.month == month)
        .group_by(died.runtime_id)  # which names the row
        .order_by(died.runtime_id)
    )
    width = len(LifetimeFacts.__slots__)
    for row in streamed(connection, query, _ROWS):
        yield Life(LifetimeFacts(*row[:width]), *row[width:])


def kept_aside(connection: Connection, tenant: str, month: str) -> Iterator[KeptAside]:
    """Records of the tenant that the ledger did not enter."""
    c = conflicts.c
    query = (
        select(c.subject, c.reason, c.at_us, c.record)
        .where(owned_by(conflicts, tenant), c.month == month)
        .order_by(c.at_us, c.digest)
    )
    for row in streamed(connection, query, _ROWS):
        yield KeptAside(*row)


def charged_orphans(connection: Connection, tenant: str, month: str) -> Iterator[Orphan]:
    """Requests of the month that no activator recorded, charged by the record of the replica that lost it."""
    c = request_records.c
    query = (
        select(c.request_id, c.runtime_id, c.ended_at_us, c.completion_tokens)
        .where(c.tenant == tenant, c.month == month, c.origin == Origin.ORPHAN.value, c.stands.is_(True))
        .order_by(c.ended_at_us, c.request_id)
    )
    for row in streamed(connection, query, _ROWS):
        yield Orphan(*row)
