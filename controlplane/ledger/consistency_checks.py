"""Compare a tenant's accounts: lifetimes, replicas without one, gaps of sources, orphans, records kept aside.

Rows are streamed. A bill lists failures only, `reconcile` lists all findings.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sqlalchemy import BigInteger, Cast, Column, Connection, Select, and_, cast, func, or_, select

from controlplane.db.database import UNREADABLE, check_row_types, stream_rows, unreadable
from controlplane.db.ledger_schema import (
    conflicts,
    lifetime_records,
    open_lives,
    owned_by,
    received,
    request_records,
    runtime_totals,
    sources,
)
from controlplane.db.schema import versions
from controlplane.ledger.closed_months import try_closed_prices
from controlplane.ledger.policy.discrepancies import (
    RECORD_DELAY_US,
    Discrepancy,
    DiscrepancyKind,
    Impact,
    LifetimeFacts,
    PriceLookup,
    SpoolPosition,
    check_lifetime,
    check_sequence_gaps,
    estimate_record_impact,
    report_charged_orphan,
    report_missing_lifetime,
    report_silent_replica,
)
from controlplane.ledger.policy.month import month_bounds_us, month_of
from controlplane.ledger.policy.rating import PriceBook, Prices
from controlplane.ledger.policy.sequence_ranges import Range
from kelvin.contracts.accounting.billing_reports import Compared
from kelvin.contracts.accounting.usage import (
    RUNNING_REPORT_INTERVAL_S,
    UNSEEN_END_PREFIX,
    LifetimeRecord,
    RecordOrigin,
    RequestRecord,
)
from kelvin.contracts.wire import BadJson, decoder

REPORT_OVERDUE_US: Final = 2 * RUNNING_REPORT_INTERVAL_S * 1_000_000  # one report may be lost
_ROWS: Final = 500  # fetched at a time
_RECORDS: Final = (decoder(RequestRecord), decoder(LifetimeRecord))


@dataclass(frozen=True, slots=True)
class OpenRuntime:
    """A runtime that served requests and has no lifetime record."""

    runtime_id: str
    requests: int
    device_us: int
    last_us: int  # end of its last request
    reported_at_us: int | None = None  # time of its last report, by our clock; None if it does not report


@dataclass(frozen=True, slots=True)
class ExternalFacts:
    """Facts that the ledger does not hold."""

    book: PriceBook
    live: Collection[str] | None  # runtimes that have not died; None if unknown
    now_us: int  # wall clock
    spools: Mapping[str, SpoolPosition] = field(default_factory=dict)  # by source


class ConsistencyChecks:
    """The checks of one tenant. Over several months, each source and each unrecorded replica is reported once."""

    def __init__(self, connection: Connection, tenant: str, external_facts: ExternalFacts) -> None:
        self._connection = connection
        self._tenant = tenant
        self._external_facts = external_facts
        self.price_lookup = build_price_lookup(connection, tenant, external_facts.book)
        self.compared = dict.fromkeys(Compared.__struct_fields__, 0)
        self._compared_sources: set[str] = set()
        self._reported_replicas: set[str] = set()  # replicas without a lifetime record

    def check_lifetimes(self, month: str) -> Iterator[Discrepancy]:
        """Compare replicas that died in the month with the requests of all their callers."""
        compared = self.compared
        for life in _lifetimes(self._connection, self._tenant, month):
            compared["replicas"] += 1
            compared["served"] += life.requests
            compared["recorded"] += life.recorded_requests
            compared["lived_us"] += life.total_us
            compared["attributed_us"] += life.parts_us
            compared["active_us"] += life.active_us
            compared["used_us"] += life.recorded_device_us
            yield from check_lifetime(life, self.price_lookup)

    def check_unrecorded_replicas(self, open_ones: Iterable[OpenRuntime]) -> Iterator[Discrepancy]:
        """Report replicas that have been dead or silent for so long that their lifetime record should have arrived."""
        live, now_us = self._external_facts.live, self._external_facts.now_us
        for each in open_ones:
            name = each.runtime_id
            if name in self._reported_replicas:
                continue
            if each.reported_at_us is not None:
                if each.reported_at_us + REPORT_OVERDUE_US < now_us:
                    self._reported_replicas.add(name)
                    yield report_silent_replica(name)
            elif live is not None and name not in live and each.last_us + RECORD_DELAY_US < now_us:
                self._reported_replicas.add(name)
                yield report_missing_lifetime(name, each.requests, each.device_us)

    def check_gaps(self, month: str) -> Iterator[Discrepancy]:
        """Report sequence gaps of each source that recorded anything in the month. Lost records may be any tenant's."""
        for source, ranges in _received_ranges(self._connection, month):
            if source not in self._compared_sources:
                self._compared_sources.add(source)
                self.compared["sources"] += 1
                yield from check_sequence_gaps(source, ranges, self._external_facts.spools.get(source))

    def check_charged_orphans(self, month: str) -> Iterator[Discrepancy]:
        """Report the month's charged requests whose activator died, so that only their replica recorded them."""
        c = request_records.c
        query = (
            select(c.request_id, c.runtime_id, c.ended_at_us, c.completion_tokens)
            .where(
                c.tenant == self._tenant, c.month == month, c.origin == RecordOrigin.ORPHAN.value, c.stands.is_(True)
            )
            .order_by(c.ended_at_us, c.request_id)
        )
        for request_id, runtime_id, ended_at_us, tokens in check_row_types(
            query, stream_rows(self._connection, query, _ROWS)
        ):
            self.compared["orphans"] += 1
            yield report_charged_orphan(request_id, runtime_id, ended_at_us, tokens, self.price_lookup)

    def check_conflicts(self, month: str) -> Iterator[Discrepancy]:
        """Report the tenant's records that were kept aside."""
        c = conflicts.c
        query = (
            select(c.subject, c.reason, c.at_us, c.record)
            .where(owned_by(conflicts, self._tenant), c.month == month)
            .order_by(c.at_us, c.digest)
        )
        for subject, reason, at_us, record in check_row_types(query, stream_rows(self._connection, query, _ROWS)):
            yield Discrepancy(DiscrepancyKind.CONFLICT, subject, reason, partial(self._estimate_impact, record, at_us))

    def _estimate_impact(self, raw: str, at_us: int) -> Impact:
        return estimate_record_impact(_try_decode_record(raw), self.price_lookup.prices(at_us))


def build_price_lookup(connection: Connection, tenant: str, book: PriceBook) -> PriceLookup:
    """Return lookups of prices and context lengths. Prices are the book's; in a closed month, its frozen ones."""
    books: dict[str, PriceBook] = {}

    def prices(at_us: int) -> Prices:
        month = month_of(at_us)
        if month not in books:
            books[month] = try_closed_prices(connection, tenant, month) or book
        return books[month].prices_at(at_us)

    def positions(model: str, version: str | None) -> int | None:
        c = versions.c
        query = select(c.max_positions).where(c.tenant == tenant, c.model == model, c.version == (version or ""))
        return connection.execute(query).scalar()

    return PriceLookup(prices, positions)


def stop_at_unreadable(findings: Iterable[Discrepancy]) -> Iterator[Discrepancy]:
    """Yield the findings up to the first unreadable row, and a finding for that row.

    Raises DBAPIError if the database is away.
    """
    try:
        yield from findings
    except UNREADABLE as error:
        yield unreadable_finding(error)


def unreadable_finding(error: Exception) -> Discrepancy:
    """Return the finding for a row that raised one of UNREADABLE. Raises DBAPIError if the database is away."""
    return Discrepancy(DiscrepancyKind.ROW_WRONG, "rows", unreadable(error), partial(Impact, None, None, None, None))


def open_runtimes(connection: Connection, tenant: str, month: str) -> Iterator[OpenRuntime]:
    """Yield the tenant's replicas that served any caller around the month and have no lifetime record."""
    begin_us, end_us = month_bounds_us(month)
    c, died, open_life = runtime_totals.c, lifetime_records.c, open_lives.c
    figures = (_sum(c.requests), _sum(c.device_us), func.max(c.last_at_us), func.max(open_life.told_at_us))
    query = (
        select(c.runtime_id, *figures)
        .join(open_lives, open_life.runtime_id == c.runtime_id, isouter=True)
        .where(or_(and_(c.tenant == tenant, c.owner.is_(None)), c.owner == tenant))
        .where(c.last_at_us >= begin_us, c.first_at_us < end_us)
        .where(~select(died.runtime_id).where(died.runtime_id == c.runtime_id).exists())
        .group_by(c.runtime_id)
        .order_by(c.runtime_id)
    )
    for row in check_row_types(query, connection.execute(query)):
        yield OpenRuntime(*row)


def _sum(figures: Column[Any]) -> Cast[int]:
    """Return the sum as an integer. PostgreSQL's sums of BIGINT columns are decimals."""
    return cast(func.sum(figures), BigInteger)


def _received_ranges(connection: Connection, month: str) -> Iterator[tuple[str, list[Range]]]:
    begin_us, end_us = month_bounds_us(month)
    query = (
        select(received.c.source, received.c.first, received.c.last)
        .join(sources, sources.c.source == received.c.source)
        .where(sources.c.first_at_us < end_us, sources.c.last_at_us >= begin_us)
        .order_by(received.c.source, received.c.first)
    )
    name, ranges = None, list[Range]()
    for source, first, last in check_row_types(query, stream_rows(connection, query, _ROWS)):
        if source != name:
            if name is not None:
                yield name, ranges
            name, ranges = source, []
        ranges.append((first, last))
    if name is not None:
        yield name, ranges


def _lifetimes(connection: Connection, tenant: str, month: str) -> Iterator[LifetimeFacts]:
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
            died.source.startswith(UNSEEN_END_PREFIX),
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
    for row in check_row_types(query, stream_rows(connection, query, _ROWS)):
        yield LifetimeFacts(*row)


def _try_decode_record(raw: str) -> RequestRecord | LifetimeRecord | None:
    for kind in _RECORDS:
        with suppress(BadJson):
            return kind.decode(raw)
    return None
