"""Store closings: prices and bill as the last link of a month's chain. Decide where late records are booked."""

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, Select, bindparam, insert, select

from controlplane.db.chained_log import ChainWriter
from controlplane.db.database import distinct_texts
from controlplane.db.hash_chain_policy import RowKind
from controlplane.db.ledger_schema import CLOSING_VALUES, closings
from controlplane.ledger.ledger_journal import ClosedMonthEntry
from controlplane.ledger.policy.month import month_after, month_of
from controlplane.ledger.policy.rating import PriceBook
from kelvin.contracts.accounting.billing_reports import BillingReport
from kelvin.contracts.wire import BadJson, decoder, encode


class ClosedMonths:
    """The closed months of these tenants, as one transaction sees them."""

    def __init__(self, connection: Connection, tenants: Collection[str]) -> None:
        self._months: defaultdict[str, set[str]] = defaultdict(set)
        query = select(closings.c.tenant, closings.c.month).where(closings.c.tenant.in_(sorted(tenants)))
        for tenant, month in connection.execute(query):
            self._months[tenant].add(month)

    def closed_months(self, tenant: str) -> Collection[str]:
        """Return the tenant's closed months."""
        return self._months.get(tenant, frozenset[str]())

    def month_for(self, tenant: str, at_us: int) -> str:
        """Return the month in which a record of that time is booked: its own month, or the next open one."""
        month = month_of(at_us)
        while month in self.closed_months(tenant):
            month = month_after(month)
        return month


def closed_report(connection: Connection, tenant: str, month: str) -> BillingReport | None:
    """Return the bill of a closed month; None for an open one."""
    row = _closing(connection, tenant, month)
    return None if row is None else decoder(BillingReport).decode(row.report)


def try_closed_prices(connection: Connection, tenant: str, month: str) -> PriceBook | None:
    """Return the prices that held when the month was closed; None for an open month."""
    row = _closing(connection, tenant, month)
    return None if row is None else prices_of(row.prices)


def closed_prices(connection: Connection, tenant: str, month: str) -> PriceBook:
    """Return the prices that held when the month was closed. Raises LookupError for an open month."""
    book = try_closed_prices(connection, tenant, month)
    if book is None:
        raise LookupError(f"{month} of {tenant} is not closed, and something of it is booked in another month")
    return book


def currencies(connection: Connection) -> set[str]:
    """Return the currencies of the closed months whose prices can be read. `kelvin billing verify` names the others."""
    found = set()
    for text in distinct_texts(connection, closings.c.prices):
        with suppress(BadJson):
            found.add(prices_of(text).currency)
    return found


def prices_of(text: str) -> PriceBook:
    """Decode the price book of a closing."""
    return decoder(PriceBook).decode(text)


def store_closing(connection: Connection, book: PriceBook, report: BillingReport) -> None:
    """Close the month of this bill: store the closing as a link of its chain."""
    assert report.closed_at_us is not None
    row: dict[str, str | int] = {
        "tenant": report.tenant,
        "closed_at_us": report.closed_at_us,
        "prices": msgspec.json.encode(book, order="deterministic").decode(),
        "report": encode(report).decode(),
    }
    chains = ChainWriter(connection)
    values = [row[column.name] for column in CLOSING_VALUES]
    place = chains.add((report.tenant, report.month), (RowKind.CLOSING, *values))
    connection.execute(insert(closings).values({**row, "month": report.month, **place._asdict()}))
    chains.write()


def journal_closing(connection: Connection, report: BillingReport) -> ClosedMonthEntry:
    """Return a closed month as an entry of the journal."""
    row = _closing(connection, report.tenant, report.month)
    assert row is not None
    return ClosedMonthEntry(prices=row.prices, report=report)


def closing_digest(connection: Connection, tenant: str, month: str) -> str:
    """Return the last digest of a closed month's chain."""
    row = _closing(connection, tenant, month)
    assert row is not None
    return str(row.chain)


def _closing(connection: Connection, tenant: str, month: str) -> Row[Any] | None:
    return connection.execute(_CLOSING, {"tenant": tenant, "month": month}).first()


_CLOSING: Final[Select[Any]] = select(closings.c.prices, closings.c.report, closings.c.chain).where(
    closings.c.tenant == bindparam("tenant"), closings.c.month == bindparam("month")
)
