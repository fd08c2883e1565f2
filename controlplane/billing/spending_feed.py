"""Publish to activators what tenants with a budget have spent of their month: the bill so far.

After a batch of records or a change of a budget, the rows of those tenants are read. Every FULL_READ_INTERVAL_S all
rows are read, because months and prices begin and replicas end. Changed rows are published.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace
from sqlalchemy import BigInteger, Connection, cast, func, or_, select
from sqlalchemy.exc import DBAPIError

from controlplane.billing.billing_report import spent_micros
from controlplane.clock import Clock
from controlplane.db.database import Database, failure_of
from controlplane.db.ledger_schema import received, sources
from controlplane.ledger.policy.month import DAY_US, month_bounds_us, month_of
from controlplane.ledger.policy.rating import PriceBook
from controlplane.registry.feed_hub import FeedHub
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)

PUBLISH_INTERVAL_S: Final = 0.25  # between two publications
FULL_READ_INTERVAL_S: Final = 30.0
RECENT_US: Final = 3_600_000_000
RECENT_SOURCES: Final = 64  # activators included although their last record is older: it may have waited in a spool
ACTIVATOR_SOURCES: Final = "activator-"


class SpendingFeed:
    """Reads the ledger and publishes what tenants have spent. Writes nothing."""

    def __init__(self, database: Database, book: PriceBook, feed: FeedHub, clock: Clock) -> None:
        self._database = database
        self._book = book
        self._feed = feed
        self._clock = clock
        self._due = asyncio.Event()
        self._published: dict[str, SpendingRow] = {}
        self._changed_tenants: set[str] = set()  # with new records, or another budget, since the last publication

    def __repr__(self) -> str:
        return f"<SpendingFeed tenants={len(self._published)}>"

    def on_requests_recorded(self, records: Iterable[RequestRecord]) -> None:
        """Note that the ledger has entered these records."""
        if tenants := {record.tenant for record in records if record.tenant in self._published}:
            self._changed_tenants |= tenants
            self._due.set()

    def on_budget_changed(self, tenant: str) -> None:
        """Note that the tenant's budget was set or removed."""
        self._changed_tenants.add(tenant)
        self._due.set()

    async def publish_spending(self) -> None:
        """Publish the changed rows of all tenants that have a budget. Raises Refused."""
        await self._publish_changed(None)

    async def run(self) -> None:
        """Publish changed rows until cancelled."""
        all_at_us = self._clock.monotonic_us()
        is_away = False
        while True:
            left_s = FULL_READ_INTERVAL_S - (self._clock.monotonic_us() - all_at_us) / 1e6
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._due.wait()
            self._due.clear()
            # A steady stream of records must not postpone the reading of all rows.
            is_all = self._clock.monotonic_us() - all_at_us >= FULL_READ_INTERVAL_S * 1e6
            try:
                await self._publish_changed(None if is_all else frozenset(self._changed_tenants))
                is_away = False
                if is_all:
                    all_at_us = self._clock.monotonic_us()
            except Refused as refused:  # the database is locked or away
                if not is_away:
                    log.warning("budgets can't be published", extra={"error": str(refused)})
                is_away = True
                self._due.set()
            except Exception:
                self._due.set()  # try again after an unexpected error, too
                raise
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    async def _publish_changed(self, tenants: Collection[str] | None) -> None:
        """Read the rows of these tenants (None: of all), and publish those that have changed."""
        noted, self._changed_tenants = self._changed_tenants, set()
        now_us = self._clock.wall_s() * 1_000_000
        # Read budgets from memory, because this runs after each batch of records.
        due_tenants = self._feed.budgets() if tenants is None else sorted(filter(self._feed.has_budget, tenants))
        try:
            rows, failed = await self._database.read(
                lambda connection: spending(connection, self._book, now_us, due_tenants)
            )
        except BaseException:
            self._changed_tenants |= noted
            raise
        for tenant, error in failed.items():
            record_error(error, f"the budget of {tenant}")
        unchanged_rows = (
            self._published
            if tenants is not None
            else {name: self._published[name] for name in failed if name in self._published}
        )
        published = dict(unchanged_rows)
        changed_rows = []
        for row in rows:
            last = self._published.get(row.tenant)
            # A new `seen` alone is sent only to tenants that have records in this batch.
            if last is None or (row if row.tenant in noted else replace(row, seen=last.seen)) != last:
                changed_rows.append(row)
                last = row
            published[row.tenant] = last
        self._published = published
        if changed_rows:
            self._feed.publish(Feed(spending=tuple(changed_rows)))


def spending(
    connection: Connection, book: PriceBook, now_us: int, tenants: Sequence[str]
) -> tuple[list[SpendingRow], dict[str, Exception]]:
    """Return the rows of these tenants, which have a budget, and the errors by tenant.

    All rows come from one snapshot: `seen` says which records of each spool the sums contain. An error in one tenant's
    accounts does not stop the others.
    """
    if not tenants:
        return [], {}
    month = month_of(now_us)
    _, ends_at_us = month_bounds_us(month)
    adjacent_months = {month_of(now_us - DAY_US), month_of(now_us + DAY_US)} - {month}
    prices = book.prices_at(now_us)
    token_prices = TokenPrices(
        per_tokens=prices.per_tokens, prompt=prices.prompt, cached=prices.cached, completion=prices.completion,
        request=prices.request,
    )  # fmt: skip
    activators = sources.c.source.startswith(ACTIVATOR_SOURCES, autoescape=True)
    late = select(sources.c.source).where(activators, sources.c.last_at_us >= now_us - RECENT_US)
    latest = select(sources.c.source).where(activators).order_by(sources.c.last_at_us.desc()).limit(RECENT_SOURCES)
    among_these = or_(received.c.source.in_(late), received.c.source.in_(latest))
    last = func.max(cast(received.c.last, BigInteger)).label("last")  # SQLite may hold a text there
    ends = select(received.c.source, last).where(among_these)
    last_by_source = {row.source: row.last for row in connection.execute(ends.group_by(received.c.source))}
    rows: list[SpendingRow] = []
    failed: dict[str, Exception] = {}
    for tenant in tenants:
        try:
            spent, *others = (
                spent_micros(connection, book, tenant, each) for each in (month, *sorted(adjacent_months))
            )
        except Exception as error:
            # An error of PostgreSQL ends the snapshot. In SQLite a text that is no UTF-8 fails only this query.
            if isinstance(error, DBAPIError) and (connection.dialect.name != "sqlite" or failure_of(error) is not None):
                raise
            failed[tenant] = error
            continue
        rows.append(
            SpendingRow(
                tenant=tenant, month=month, ends_at_us=ends_at_us, prices=token_prices, seen=last_by_source,
                spent_micros=spent,
                beside=dict(zip(sorted(adjacent_months), others, strict=True)),
            )
        )  # fmt: skip
    return rows, failed
