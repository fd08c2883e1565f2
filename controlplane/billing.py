"""A tenant's month out of the ledger: quantities, money, and what does not balance. One snapshot, bounded memory.

All comes from totals that are kept with the records, so a month of any size gives a few rows; prices are `rating`'s,
checks `balance`'s. A closed month's report is what it was when it was closed.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from sqlalchemy import Connection, Select, Table, bindparam, select

from contracts.billing import Balance, BillingReport, Imbalance
from controlplane.accounts import OpenRuntime, kept_aside, lives, open_runtimes, received_ranges
from controlplane.closings import frozen_report
from controlplane.ledger_schema import device_totals, request_totals, step_totals
from controlplane.policy.balance import SETTLE_US, conflict, holes, lifetime_problems, missing_lifetime
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import PriceBook
from controlplane.sheet import Pricing, Sheet

MAX_PROBLEMS: Final = 200  # listed; the rest is counted
MAX_OPEN: Final = 100


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
    sheet = _sheet(connection, book, tenant, month)
    open_ones = open_runtimes(connection, tenant, begin_us, end_us)
    balance = _balance(connection, tenant, month, _gone(open_ones, live, now_us))
    return sheet.report(tenant, month, balance, tuple(each.runtime_id for each in open_ones[:MAX_OPEN]))


def spent_micros(connection: Connection, book: PriceBook, tenant: str, month: str) -> int:
    """Return the total of `billing_report` without its checks. Raises Refused(InvalidRequest) for a malformed month."""
    month_bounds_us(month)
    if (frozen := frozen_report(connection, tenant, month)) is not None:
        return frozen.total_micros
    return sum(line.amount_micros for line in _sheet(connection, book, tenant, month).bill.lines())


def _sheet(connection: Connection, book: PriceBook, tenant: str, month: str) -> Sheet:
    sheet = Sheet(Pricing(connection, book, tenant, month))
    which = {"tenant": tenant, "month": month}
    for total in connection.execute(_REQUESTS, which):
        sheet.add_requests(*total)
    for total in connection.execute(_STEPS, which):
        sheet.add_step(*total)
    for total in connection.execute(_DEVICES, which):
        sheet.add_device_time(*total)
    return sheet


def _totals(table: Table) -> Select[Any]:
    """Select all other columns of a tenant's month. Built once, because budgets run it for each tenant."""
    rest = [column for column in table.c if column.name not in ("tenant", "month")]
    return select(*rest).where(table.c.tenant == bindparam("tenant"), table.c.month == bindparam("month"))


_REQUESTS: Final = _totals(request_totals)
_STEPS: Final = _totals(step_totals)
_DEVICES: Final = _totals(device_totals)


def _gone(open_ones: Iterable[OpenRuntime], live: Collection[str] | None, now_us: int) -> Iterator[Imbalance]:
    """Of the open ones, those that are dead for long enough that their record should be here."""
    if live is None:
        return
    for each in open_ones:
        if each.told_us is None and each.runtime_id not in live and each.last_us + SETTLE_US < now_us:
            yield missing_lifetime(each.runtime_id, each.requests)


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

    for source, ranges in received_ranges(connection, begin_us, end_us):
        source_count += 1
        note(holes(source, ranges))
    for life in lives(connection, tenant, month):
        lifetimes += 1
        note(lifetime_problems(life.facts))
    note(gone)
    note(conflict(each.subject, each.reason) for each in kept_aside(connection, tenant, month))
    return Balance(
        balanced=found == 0,
        lifetimes=lifetimes,
        sources=source_count,
        problems=tuple(listed),
        more=found - len(listed),
    )
