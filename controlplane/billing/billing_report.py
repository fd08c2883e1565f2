"""Report a tenant's month from the ledger: quantities, amounts, and what does not balance. Memory is bounded.

Everything comes from one snapshot and from totals kept beside the records, so a month of any size gives a few rows.
`rating.py` computes amounts, `consistency_checks.py` finds imbalances. A closed month's report never changes.
"""

from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Select, Table, bindparam, select

from controlplane.billing.bill_builder import BillBuilder, Pricing
from controlplane.db.database import check_row_types, refuse_unreadable
from controlplane.db.ledger_schema import device_totals, request_totals, step_totals
from controlplane.ledger.closed_months import closed_report, closing_digest, store_closing
from controlplane.ledger.consistency_checks import (
    ConsistencyChecks,
    ExternalFacts,
    OpenRuntime,
    open_runtimes,
    stop_at_unreadable,
)
from controlplane.ledger.policy.month import month_bounds_us
from controlplane.ledger.policy.rating import PriceBook
from kelvin.contracts.accounting.billing_reports import Balance, BillingReport, ClosingReport, Imbalance
from kelvin.contracts.errors import Conflict, Refused

MAX_PROBLEMS: Final = 200  # listed ones; further ones are counted
MAX_OPEN_RUNTIMES: Final = 100
CLOSING_DELAY_US: Final = 3_600_000_000  # records of the last minutes are still arriving


def billing_report(
    connection: Connection,
    book: PriceBook,
    tenant: str,
    month: str,
    *,
    live: Collection[str] | None,
    now_us: int,
) -> BillingReport:
    """Return the bill of a month. `live` are the live runtimes, None if unknown; `now_us` is wall clock time.

    Raises Refused: InvalidRequest for a malformed month, Conflict if a needed row can't be read.
    """
    month_bounds_us(month)
    with refuse_unreadable(f"month {month}", "kelvin billing verify"):
        return _report(connection, book, tenant, month, live=live, now_us=now_us)


def _report(
    connection: Connection, book: PriceBook, tenant: str, month: str, *, live: Collection[str] | None, now_us: int
) -> BillingReport:
    if (frozen := closed_report(connection, tenant, month)) is not None:
        return frozen
    bill_builder = _build_bill(connection, book, tenant, month)
    open_ones = list(open_runtimes(connection, tenant, month))
    checks = ConsistencyChecks(connection, tenant, ExternalFacts(book, live, now_us))
    balance = _balance(checks, month, open_ones)
    return bill_builder.report(tenant, month, balance, tuple(each.runtime_id for each in open_ones[:MAX_OPEN_RUNTIMES]))


def close_month(
    connection: Connection, book: PriceBook, tenant: str, month: str, *, live: Collection[str] | None, now_us: int
) -> ClosingReport:
    """Freeze prices and bill of a month. Later records become adjustments of an open month. Idempotent.

    Raises Refused: InvalidRequest for a malformed month, Conflict until an hour after the month's end.
    """
    _, end_us = month_bounds_us(month)
    if now_us < end_us + CLOSING_DELAY_US:
        raise Refused(Conflict("month", f"{month} can be closed an hour after its end"))
    if closed_report(connection, tenant, month) is None:
        report = billing_report(connection, book, tenant, month, live=live, now_us=now_us)
        store_closing(connection, book, msgspec.structs.replace(report, closed_at_us=now_us))
    frozen = closed_report(connection, tenant, month)
    assert frozen is not None
    return ClosingReport(report=frozen, chain=closing_digest(connection, tenant, month))


def spent_micros(connection: Connection, book: PriceBook, tenant: str, month: str) -> int:
    """Return the total of `billing_report` without its checks. Raises Refused(InvalidRequest) for a malformed month."""
    month_bounds_us(month)
    if (frozen := closed_report(connection, tenant, month)) is not None:
        return frozen.total_micros
    return sum(line.amount_micros for line in _build_bill(connection, book, tenant, month).bill.lines())


def _build_bill(connection: Connection, book: PriceBook, tenant: str, month: str) -> BillBuilder:
    bill_builder = BillBuilder(Pricing(connection, book, tenant, month))
    parameters = {"tenant": tenant, "month": month}
    bill_builder.add_totals(
        *(check_row_types(totals, connection.execute(totals, parameters)) for totals in (_REQUESTS, _STEPS, _DEVICES))
    )
    return bill_builder


def _totals(table: Table) -> Select[Any]:
    """Return a query of the other columns for a tenant's month. Built once, because budgets run it for each tenant."""
    rest = [column for column in table.c if column.name not in ("tenant", "month")]
    return select(*rest).where(table.c.tenant == bindparam("tenant"), table.c.month == bindparam("month"))


_REQUESTS: Final = _totals(request_totals)
_STEPS: Final = _totals(step_totals)
_DEVICES: Final = _totals(device_totals)


def _balance(checks: ConsistencyChecks, month: str, open_ones: Iterable[OpenRuntime]) -> Balance:
    """Return all failing discrepancies, without their sizes."""
    listed: list[Imbalance] = []
    found = 0
    parts = (
        checks.check_gaps(month),
        checks.check_lifetimes(month),
        checks.check_unrecorded_replicas(open_ones),
        checks.check_conflicts(month),
    )
    for each in chain.from_iterable(map(stop_at_unreadable, parts)):
        if each.fails:
            found += 1
            if len(listed) < MAX_PROBLEMS:
                listed.append(Imbalance(kind=each.kind, subject=each.subject, detail=each.detail))
    return Balance(
        balanced=found == 0,
        lifetimes=checks.compared["replicas"],
        sources=checks.compared["sources"],
        problems=tuple(listed),
        more=found - len(listed),
    )
