"""A tenant's month out of the ledger: quantities, money, and what does not balance. One snapshot, bounded memory.

All comes from totals that are kept with the records, so a month of any size gives a few rows; prices are `rating`'s,
checks `balance`'s. A closed month's report is what it was when it was closed.
"""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, Final

from sqlalchemy import Connection, Select, Table, and_, func, select

from contracts.billing import Balance, BillingReport, Imbalance
from controlplane.closings import frozen_report
from controlplane.ledger_schema import (
    conflicts,
    device_totals,
    lifetime_records,
    received,
    request_totals,
    runtime_totals,
    sources,
)
from controlplane.policy.balance import (
    SETTLE_US,
    LifetimeFacts,
    Range,
    conflict,
    holes,
    lifetime_problems,
    missing_lifetime,
)
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import PriceBook
from controlplane.sheet import Pricing, Sheet

MAX_PROBLEMS: Final = 200  # listed; the rest is counted
MAX_OPEN: Final = 100
_ROWS: Final = 500  # fetched at a time


def billing_report(
    connection: Connection,
    book: PriceBook,
    tenant: str,
    month: str,
    *,
    live: Collection[str] | None,
    now_us: int,
) -> BillingReport:
    """`live` are the runtimes that have not died, None where nobody knows; `now_us` is wall clock.

    Raises Refused(InvalidRequest) for a month that is none.
    """
    begin_us, end_us = month_bounds_us(month)
    if (frozen := frozen_report(connection, tenant, month)) is not None:
        return frozen
    sheet = Sheet(Pricing(connection, book, tenant, month))
    for total in connection.execute(_of(request_totals, tenant, month)):
        sheet.add_requests(*total)
    for total in connection.execute(_of(device_totals, tenant, month)):
        sheet.add_device_time(*total)
    open_runtimes = dict(_open_runtimes(connection, tenant, begin_us, end_us))
    balance = _balance(connection, tenant, month, _gone(open_runtimes, live, now_us))
    return sheet.report(tenant, month, balance, tuple(islice(open_runtimes, MAX_OPEN)))


def _of(table: Table, tenant: str, month: str) -> Select[Any]:
    """All but the names of tenant and month."""
    rest = [column for column in table.c if column.name not in ("tenant", "month")]
    return select(*rest).where(table.c.tenant == tenant, table.c.month == month)


def _open_runtimes(
    connection: Connection, tenant: str, begin_us: int, end_us: int
) -> list[tuple[str, tuple[int, int]]]:
    """Runtimes that served around the month and have no lifetime record: (requests, end of the last)."""
    c, died = runtime_totals.c, lifetime_records.c
    query = (
        select(c.runtime_id, c.requests, c.last_at_us)
        .where(c.tenant == tenant, c.last_at_us >= begin_us, c.first_at_us < end_us)
        .where(~select(died.runtime_id).where(died.runtime_id == c.runtime_id).exists())
        .order_by(c.runtime_id)
    )
    return [(runtime_id, (count, last_us)) for runtime_id, count, last_us in connection.execute(query)]


def _gone(open_runtimes: dict[str, tuple[int, int]], live: Collection[str] | None, now_us: int) -> Iterator[Imbalance]:
    """Of the open ones, those that are dead for long enough that their record should be here."""
    if live is None:
        return
    for runtime_id, (requests, last_us) in open_runtimes.items():
        if runtime_id not in live and last_us + SETTLE_US < now_us:
            yield missing_lifetime(runtime_id, requests)


def _balance(connection: Connection, tenant: str, month: str, gone: Iterator[Imbalance]) -> Balance:
    begin_us, end_us = month_bounds_us(month)
    listed: list[Imbalance] = []
    lifetimes = source_count = found = 0

    def note(problems: Iterator[Imbalance]) -> None:
        nonlocal found
        for problem in problems:
            found += 1
            if len(listed) < MAX_PROBLEMS:
                listed.append(problem)

    for source, ranges in _received(connection, begin_us, end_us):
        source_count += 1
        note(holes(source, ranges))
    for facts in _lifetimes(connection, tenant, month):
        lifetimes += 1
        note(lifetime_problems(facts))
    note(gone)
    note(_conflicts(connection, tenant, month))
    return Balance(
        balanced=found == 0,
        lifetimes=lifetimes,
        sources=source_count,
        problems=tuple(listed),
        more=found - len(listed),
    )


def _received(connection: Connection, begin_us: int, end_us: int) -> Iterator[tuple[str, list[Range]]]:
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


def _lifetimes(connection: Connection, tenant: str, month: str) -> Iterator[LifetimeFacts]:
    """Each replica whose death is booked in the month, beside all its requests, whenever they ended."""
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
            func.coalesce(uses.requests, 0),
            func.coalesce(uses.answered, 0),
            func.coalesce(uses.device_us, 0),
        )
        .join(runtime_totals, and_(uses.runtime_id == died.runtime_id, uses.tenant == died.tenant), isouter=True)
        .where(died.tenant == tenant, died.month == month)
        .order_by(died.runtime_id)
        .execution_options(yield_per=_ROWS)
    )
    for row in connection.execute(query):
        yield LifetimeFacts(*row)


def _conflicts(connection: Connection, tenant: str, month: str) -> Iterator[Imbalance]:
    c = conflicts.c
    query = (
        select(c.subject, c.reason)
        .where(c.tenant == tenant, c.month == month)
        .order_by(c.at_us, c.digest)
        .execution_options(yield_per=_ROWS)
    )
    for subject, reason in connection.execute(query):
        yield conflict(subject, reason)
