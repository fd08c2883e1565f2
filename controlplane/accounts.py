"""The accounts of a month as the ledger holds them: replicas, sources, orphans, records kept aside. Rows are streamed.

`billing` asks whether they are whole, `reconcile` what differs and how much that is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, func, or_, select

from contracts.usage import Origin
from controlplane.ledger_schema import (
    conflicts,
    lifetime_records,
    received,
    request_records,
    runtime_totals,
    sources,
)
from controlplane.policy.balance import LifetimeFacts, Range

_ROWS: Final = 500  # fetched at a time


@dataclass(frozen=True, slots=True)
class OpenRuntime:
    """One that served and has no lifetime record."""

    runtime_id: str
    requests: int
    device_us: int
    last_us: int  # end of its last request


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
    c, died = runtime_totals.c, lifetime_records.c
    query = (
        select(c.runtime_id, func.sum(c.requests), func.sum(c.device_us), func.max(c.last_at_us))
        .where(or_(and_(c.tenant == tenant, c.owner.is_(None)), c.owner == tenant))
        .where(c.last_at_us >= begin_us, c.first_at_us < end_us)
        .where(~select(died.runtime_id).where(died.runtime_id == c.runtime_id).exists())
        .group_by(c.runtime_id)
        .order_by(c.runtime_id)
    )
    return [OpenRuntime(*row) for row in connection.execute(query)]


def received_ranges(connection: Connection, begin_us: int, end_us: int) -> Iterator[tuple[str, list[Range]]]:
    """What arrived of each source that recorded anything in the month: a lost record may have been anybody's."""
    query = (
        select(received.c.source, received.c.first, received.c.last)
        .join(sources, sources.c.source == received.c.source)
        .where(sources.c.first_at_us < end_us, sources.c.last_at_us >= begin_us)
        .order_by(received.c.source, received.c.first)
        .execution_options(yield_per=_ROWS)
    )
    name, ranges = None, list[Range]()
    for source, first, last in connection.execute(query):
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
            func.coalesce(func.sum(uses.requests), 0),
            func.coalesce(func.sum(uses.answered), 0),
            func.coalesce(func.sum(uses.device_us), 0),
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
        .execution_options(yield_per=_ROWS)
    )
    width = len(LifetimeFacts.__slots__)
    for row in connection.execute(query):
        yield Life(LifetimeFacts(*row[:width]), *row[width:])


def kept_aside(connection: Connection, tenant: str, month: str) -> Iterator[KeptAside]:
    """Records of the tenant that the ledger did not enter."""
    c = conflicts.c
    query = (
        select(c.subject, c.reason, c.at_us, c.record)
        .where(c.tenant == tenant, c.month == month)
        .order_by(c.at_us, c.digest)
        .execution_options(yield_per=_ROWS)
    )
    for row in connection.execute(query):
        yield KeptAside(*row)


def charged_orphans(connection: Connection, tenant: str, month: str) -> Iterator[Orphan]:
    """Requests of the month that no activator recorded, charged by the record of the replica that lost it."""
    c = request_records.c
    query = (
        select(c.request_id, c.runtime_id, c.ended_at_us, c.completion_tokens)
        .where(c.tenant == tenant, c.month == month, c.origin == Origin.ORPHAN.value, c.stands.is_(True))
        .order_by(c.ended_at_us, c.request_id)
        .execution_options(yield_per=_ROWS)
    )
    for row in connection.execute(query):
        yield Orphan(*row)
