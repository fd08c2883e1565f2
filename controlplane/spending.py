"""Tells activators what tenants with a budget have spent of their month: the bill as it stands, after each batch of
records, when a budget is given, and now and then, as months and prices begin and replicas end.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

from sqlalchemy import Connection, func, select

from contracts.errors import Refused
from contracts.spending import SpendingRow, TokenPrices
from contracts.usage import RequestRecord
from controlplane import schema
from controlplane.billing import spent_micros
from controlplane.clock import Clock
from controlplane.ledger_schema import received, sources
from controlplane.policy.access import TenantState
from controlplane.policy.month import month_bounds_us, month_of
from controlplane.policy.rating import PriceBook
from controlplane.store import Database

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.25  # between two tellings
AGAIN_S: Final = 30.0
LATELY_US: Final = 3_600_000_000
ACTIVATORS: Final = "activator-"


class SpendingPublisher(Protocol):
    """Where rows go."""

    def publish(self, *, spending: tuple[SpendingRow, ...] = ()) -> int: ...


class Spending:
    """Reads the ledger; writes nothing."""

    def __init__(self, database: Database, book: PriceBook, publisher: SpendingPublisher, clock: Clock) -> None:
        self._database = database
        self._book = book
        self._publisher = publisher
        self._clock = clock
        self._due = asyncio.Event()
        self._told: dict[str, SpendingRow] = {}

    def __repr__(self) -> str:
        return f"<Spending tenants={len(self._told)}>"

    def noted(self, records: Iterable[RequestRecord]) -> None:
        """The ledger has these."""
        if any(record.tenant in self._told for record in records):
            self._due.set()

    def changed(self) -> None:
        """A budget was given or taken."""
        self._due.set()

    async def tell(self) -> None:
        """What has changed of those that have a budget."""
        now_us = self._clock.wall_s() * 1_000_000
        rows = await self._database.read(lambda connection: spending(connection, self._book, now_us))
        news = tuple(row for row in rows if self._told.get(row.tenant) != row)
        self._told = {row.tenant: row for row in rows}
        if news:
            self._publisher.publish(spending=news)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), AGAIN_S)
            self._due.clear()
            try:
                await self.tell()
            except Refused as refused:  # the database is another's for a moment
                log.warning("budgets are not told", extra={"error": str(refused)})
                self._due.set()
            except Exception:
                self._due.set()  # what is due stays so, whatever prevented it
                raise
            await asyncio.sleep(PAUSE_S)


def spending(connection: Connection, book: PriceBook, now_us: int) -> list[SpendingRow]:
    """Of all tenants with a budget, in one snapshot: what is seen of a spool is in the sums."""
    table = schema.tenants
    wanted = select(table.c.tenant).where(table.c.budget_micros.is_not(None), table.c.state != TenantState.DELETED)
    tenants = list(connection.execute(wanted.order_by(table.c.tenant)).scalars())
    if not tenants:
        return []
    month = month_of(now_us)
    _, ends_at_us = month_bounds_us(month)
    prices = book.at(now_us)
    told = TokenPrices(
        per_tokens=prices.per_tokens, prompt=prices.prompt, cached=prices.cached, completion=prices.completion,
        request=prices.request,
    )  # fmt: skip
    late = select(sources.c.source).where(
        sources.c.last_at_us >= now_us - LATELY_US, sources.c.source.startswith(ACTIVATORS, autoescape=True)
    )
    ends = select(received.c.source, func.max(received.c.last).label("last")).where(received.c.source.in_(late))
    seen = {row.source: row.last for row in connection.execute(ends.group_by(received.c.source))}
    return [
        SpendingRow(
            tenant=tenant, month=month, ends_at_us=ends_at_us, prices=told, seen=seen,
            spent_micros=spent_micros(connection, book, tenant, month),
        )
        for tenant in tenants
    ]  # fmt: skip
