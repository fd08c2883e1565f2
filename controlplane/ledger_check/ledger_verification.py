"""Recompute a ledger's chains, charges, totals and closed bills from its rows, and report the first difference.

Stored totals and chain ends are not trusted. Rows are streamed into `RecomputedTotals`. Of each chain only the first
difference is reported, because nothing after it can be trusted. `verify_all_chains` also covers the audit log.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from msgspec import UNSET, structs
from sqlalchemy import Column, Connection, Row, Table, func, select, union

from controlplane.audit.audit_rows import ALL_TENANTS, verify_audit
from controlplane.billing.bill_builder import BillBuilder, Pricing
from controlplane.db import schema
from controlplane.db.chained_log import LEDGER, OnProgress
from controlplane.db.database import check_row_types, distinct_texts, stream_rows
from controlplane.db.hash_chain_policy import ChainReader, RowKind
from controlplane.db.ledger_schema import (
    CLOSING_VALUES,
    CONFLICT_VALUES,
    LIFETIME_VALUES,
    REQUEST_VALUES,
    chains,
    closings,
    conflicts,
    device_totals,
    digested_marks,
    lifetime_records,
    owned_by,
    request_records,
    request_totals,
    step_totals,
)
from controlplane.ledger.closed_months import ClosedMonths, prices_of
from controlplane.ledger.consistency_checks import stop_at_unreadable
from controlplane.ledger.policy.discrepancies import Discrepancy, DiscrepancyKind
from controlplane.ledger.policy.month import is_month
from controlplane.ledger.request_rows import known_requests, mark_all_charged, requests_with_same_key
from controlplane.ledger_check.recomputed_totals import COUNTED_COLUMNS, RecomputedTotals, RuntimeTotals
from kelvin.contracts.accounting.audit_reports import AuditChain
from kelvin.contracts.accounting.backup_reports import RestoredChain
from kelvin.contracts.accounting.billing_reports import BillingReport, ChainReport, LedgerDifference, VerifyReport
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, is_charged
from kelvin.contracts.wire import decoder

_ROWS: Final = 2_000
_MARK_COLUMNS: Final = tuple(request_records.c[name] for name in ("stands", "billable", "replaces", "once", "degraded"))
_STREAMS: Final[Sequence[tuple[RowKind, Table, Sequence[Column[Any]], Sequence[Column[Any]]]]] = (
    (RowKind.REQUEST, request_records, REQUEST_VALUES, _MARK_COLUMNS),
    (RowKind.LIFETIME, lifetime_records, LIFETIME_VALUES, ()),
    (RowKind.CONFLICT, conflicts, CONFLICT_VALUES, ()),
    (RowKind.CLOSING, closings, CLOSING_VALUES, ()),
)
_SUBJECT_COLUMN: Final = {RowKind.REQUEST: "request_id", RowKind.LIFETIME: "runtime_id", RowKind.CONFLICT: "subject"}
# A row of a stream has its link, its digest, the values that the digest covers, and marks.
_LINK, _CHAIN = 0, 1
_CHAINED_SLICE: Final = {kind: slice(2, 2 + len(values)) for kind, _, values, _ in _STREAMS}
_DIGESTED_MARKS_SLICE: Final = slice(-2, None)  # the last marks of a request, which its digest covers if they are set
_REQUEST_NAMES: Final = ("link", "chain", *(column.name for column in (*REQUEST_VALUES, *_MARK_COLUMNS)))
_counted_columns: Final = itemgetter(*(_REQUEST_NAMES.index(name) for name in COUNTED_COLUMNS))
_charge_columns: Final = itemgetter(
    *(_REQUEST_NAMES.index(name) for name in ("request_id", "origin", "outcome", "completion_tokens"))
)
_mark_columns: Final = itemgetter(*(_REQUEST_NAMES.index(column.name) for column in _MARK_COLUMNS))
_COUNTED_COLUMNS: Final = tuple(request_records.c[name] for name in COUNTED_COLUMNS)
_REQUEST_ID, _RUNTIME_ID = COUNTED_COLUMNS.index("request_id"), COUNTED_COLUMNS.index("runtime_id")

ChainRow = tuple[int, RowKind, Row[Any]]


def list_months(connection: Connection, tenant: str) -> list[str]:
    """Return every month that has rows or a chain.

    Malformed months are left out; `verify_ledger` reports them.
    """
    return [name for name in _list_month_names(connection, tenant) if is_month(name)]


def _list_month_names(connection: Connection, tenant: str) -> list[str]:
    """Return all values of the tenant's month columns, malformed ones included."""
    records = (request_records, lifetime_records, conflicts, closings, chains)
    tables = (*records, request_totals, step_totals, device_totals)
    parts = [select(table.c.month).where(owned_by(table, tenant)).distinct() for table in tables]
    return distinct_texts(connection, union(*parts).subquery().c.month)


def count_entries(connection: Connection, tenant: str, months: Sequence[str]) -> int:
    """Return about how many rows have to be read."""
    c = chains.c
    query = select(func.coalesce(func.sum(c.links), 0)).where(c.tenant == tenant, c.month.in_(months))
    return int(connection.execute(query).scalar_one())


def verify_ledger(
    connection: Connection, tenant: str, month: str | None, on_progress: OnProgress = lambda rows: None
) -> VerifyReport:
    """Verify one month; without `month` all months, and the totals by replica."""
    names = [month] if month is not None else _list_month_names(connection, tenant)
    months = [each for each in names if each == month or is_month(each)]
    runtimes = RuntimeTotals(connection, tenant) if month is None else None
    reports = tuple(verify_month(connection, tenant, each, runtimes, on_progress) for each in months)
    reports += tuple(_report_malformed_month(tenant, each) for each in names if each not in months)
    sound = not any(each.differences for each in reports)
    # An unsound month was not read to its end, so the totals by replica would be incomplete.
    replicas = _first_difference("", stop_at_unreadable(runtimes.findings())) if runtimes is not None and sound else ()
    return VerifyReport(tenant=tenant, sound=sound and not replicas, months=reports, replicas=replicas)


def verify_month(
    connection: Connection,
    tenant: str,
    month: str,
    runtimes: RuntimeTotals | None = None,
    on_progress: OnProgress = lambda rows: None,
) -> ChainReport:
    """Verify a tenant's month. The tenant "" is the platform."""
    rows = MonthVerification(connection, tenant, month, runtimes, on_progress)
    differences = _first_difference(month, rows.findings())
    return ChainReport(
        month=month,
        links=rows.chain.links,
        chain=rows.chain.end.hex(),
        closed=rows.closing is not None,
        differences=differences,
    )


def _report_malformed_month(tenant: str, name: str) -> ChainReport:
    wrong = LedgerDifference(month=name, subject="rows", detail=f"their month is {name!r}, which is none")
    return ChainReport(
        month=name, links=0, chain=LEDGER.genesis((tenant, name)).hex(), closed=False, differences=(wrong,)
    )


def _first_difference(month: str, findings: Iterator[Discrepancy]) -> tuple[LedgerDifference, ...]:
    return tuple(
        LedgerDifference(month=month, subject=each.subject, detail=each.detail)
        for each in itertools.islice(findings, 1)
    )


class MonthVerification:
    """One pass over the rows of a tenant's month: for all findings (`findings`), or for wrong totals (`totals`)."""

    def __init__(
        self,
        connection: Connection,
        tenant: str,
        month: str,
        runtimes: RuntimeTotals | None,
        on_progress: OnProgress = lambda rows: None,
    ) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self._on_progress = on_progress
        self._recomputed = RecomputedTotals(connection, tenant, month, runtimes)
        self.chain = ChainReader(LEDGER.genesis((tenant, month)))
        self.closing: Mapping[str, Any] | None = None
        self.rows = 0  # rows read so far

    def findings(self) -> Iterator[Discrepancy]:
        """Yield what is wrong, in this order: links, end of the chain, totals, the closed bill. Stop after a wrong
        link.

        A row may have been changed to anything, also to values that the column's type can't hold. An unreadable row is
        a finding. Some rows, such as other records of a request, are read before their own link is checked.
        """
        yield from stop_at_unreadable(self._findings())

    def _findings(self) -> Iterator[Discrepancy]:
        name = self._tenant, self._month
        written = LEDGER.end_of(self._connection, name) or (0, LEDGER.genesis(name).hex())
        closed_months = ClosedMonths(self._connection, {self._tenant})
        streams = [
            self._stream(kind, table, (table.c.chain, *values, *marks)) for kind, table, values, marks in _STREAMS
        ]
        for link, kind, row in self._read(heapq.merge(*streams, key=itemgetter(_LINK))):
            if (finding := self._check(link, kind, row, closed_months)) is not None:
                yield finding
                return
            if kind is RowKind.CLOSING:
                self.closing = _named(CLOSING_VALUES, row[_CHAINED_SLICE[kind]])
            elif kind is not RowKind.CONFLICT:
                self._count(kind, _counted_columns(row) if kind is RowKind.REQUEST else row[_CHAINED_SLICE[kind]])
        if (problem := self.chain.check_end(*written)) is not None:
            yield Discrepancy(DiscrepancyKind.ROW_WRONG, "end", problem)
            return
        yield from self._recomputed.findings()
        if self.closing is not None:
            yield from self._check_bill(self.closing)

    def totals(self, each_request: Callable[[str, str | None], None]) -> Iterator[Discrepancy]:
        """Yield the stored totals that differ from the rows, whatever the state of the chain. `each_request` is called
        with the request id and the replica of each request record.
        """
        requests = self._stream(RowKind.REQUEST, request_records, _COUNTED_COLUMNS, is_typed=True)
        lives = self._stream(RowKind.LIFETIME, lifetime_records, LIFETIME_VALUES, is_typed=True)
        for _, kind, row in self._read(itertools.chain(requests, lives)):
            figures = row[1:]
            self._count(kind, figures)
            if kind is RowKind.REQUEST:
                each_request(figures[_REQUEST_ID], figures[_RUNTIME_ID])
        yield from self._recomputed.findings()

    def _read(self, links: Iterable[ChainRow]) -> Iterator[ChainRow]:
        for each in links:
            yield each
            self.rows += 1
            if self.rows % _ROWS == 0:
                self._on_progress(_ROWS)

    def _stream(
        self, kind: RowKind, table: Table, columns: Sequence[Column[Any]], *, is_typed: bool = False
    ) -> Iterator[ChainRow]:
        query = (
            select(table.c.link, *columns)
            .where(owned_by(table, self._tenant), table.c.month == self._month)
            .order_by(table.c.link)
        )
        rows = stream_rows(self._connection, query, _ROWS)
        for row in check_row_types(query, rows) if is_typed else rows:
            yield row[_LINK], kind, row

    def _count(self, kind: RowKind, figures: Sequence[Any]) -> None:
        if kind is RowKind.REQUEST:
            self._recomputed.add_request(*figures)
        else:
            self._recomputed.add_lifetime(LifetimeRecord(**_named(LIFETIME_VALUES, figures)))

    def _check(self, link: int, kind: RowKind, row: Row[Any], closed_months: ClosedMonths) -> Discrepancy | None:
        problem = self.chain.check_link(link)
        if problem is None and self.closing is not None:
            problem = f"link {link} was added after the month was closed"
        if problem is None:
            marks = digested_marks(*row[_DIGESTED_MARKS_SLICE]) if kind is RowKind.REQUEST else ()
            problem = self.chain.advance(link, (kind, *row[_CHAINED_SLICE[kind]], *marks), row[_CHAIN])
        if problem is not None:
            return self._row_discrepancy(kind, row, problem)
        return self._check_charge(row, closed_months) if kind is RowKind.REQUEST else None

    def _check_charge(self, row: Row[Any], closed_months: ClosedMonths) -> Discrepancy | None:
        """Check that the right record of a request is charged. That follows from all records of the request and of
        requests with the same idempotency key. A single record of an activator is always charged.
        """
        request_id, origin, outcome, tokens = _charge_columns(row)
        stands, billable, replaces, once, _ = _mark_columns(row)
        if billable is not is_charged(outcome, tokens):
            return self._row_discrepancy(
                RowKind.REQUEST, row, f"billable is {billable}; its outcome and tokens say otherwise"
            )
        if origin == RecordOrigin.ORPHAN or replaces is not None or not stands or once is not None:
            name = self._tenant, request_id
            known = known_requests(self._connection, [name])
            known |= requests_with_same_key(self._connection, known)
            if mark_all_charged(known, closed_months)[name] != known[name]:
                return self._row_discrepancy(
                    RowKind.REQUEST, row, "which record of this request is charged is not what its records say"
                )
        return None

    def _check_bill(self, closing: Mapping[str, Any]) -> Iterator[Discrepancy]:
        """Compare the frozen bill with the bill of the rows at the frozen prices."""
        report = decoder(BillingReport).decode(closing["report"])
        bill_builder = BillBuilder(Pricing(self._connection, prices_of(closing["prices"]), self._tenant, self._month))
        bill_builder.add_totals(*self._recomputed.rows())
        recomputed = bill_builder.report(
            self._tenant, self._month, report.balance, report.open_runtimes, report.closed_at_us
        )
        if report.degraded is UNSET:
            recomputed = structs.replace(recomputed, degraded=UNSET)
        if report != recomputed:
            part = next(name for name in report.__struct_fields__ if getattr(report, name) != getattr(recomputed, name))
            detail = f"the closed bill's {part} is not what the rows make at its prices"
            yield Discrepancy(DiscrepancyKind.BILL_WRONG, "closing", detail)

    def _row_discrepancy(self, kind: RowKind, row: Row[Any], detail: str) -> Discrepancy:
        name = self._month if kind is RowKind.CLOSING else row._mapping[_SUBJECT_COLUMN[kind]]
        return Discrepancy(DiscrepancyKind.ROW_WRONG, f"{kind} {name}", detail)


def _named(columns: Sequence[Column[Any]], values: Sequence[Any]) -> dict[str, Any]:
    return {column.name: value for column, value in zip(columns, values, strict=True)}


@dataclass(frozen=True, slots=True)
class ChainVerification:
    """All chains, recomputed from their rows."""

    ledger: tuple[RestoredChain, ...]
    audits: tuple[AuditChain, ...]

    @property
    def fault(self) -> str | None:
        """Return a text about the first chain with a difference; None if all hold."""
        for month in self.ledger:
            if month.difference is not None:
                return f"the ledger of {month.tenant} {month.month} is not sound: {month.difference}"
        for audit in self.audits:
            if audit.difference is not None:
                return f"the audit of {audit.tenant or 'the installation'} is not sound: {audit.difference}"
        return None


def verify_all_chains(connection: Connection) -> ChainVerification:
    """Recompute all chains in one transaction. Reads every row."""
    return ChainVerification(_verify_every_month(connection), verify_audit(connection, ALL_TENANTS).chains)


def _verify_every_month(connection: Connection) -> tuple[RestoredChain, ...]:
    """Verify every month of every tenant, and those of the platform ("")."""
    owners = {*distinct_texts(connection, schema.tenants.c.tenant), *distinct_texts(connection, chains.c.tenant), ""}
    found = []
    for tenant in sorted(owners):
        report = verify_ledger(connection, tenant, None)
        for month in report.months:
            difference = next((f"{each.subject}: {each.detail}" for each in month.differences), None)
            found.append(
                RestoredChain(
                    tenant=tenant, month=month.month, links=month.links, chain=month.chain, difference=difference
                )
            )
        found += [
            RestoredChain(tenant=tenant, month="", links=0, chain="", difference=f"{each.subject}: {each.detail}")
            for each in report.replicas
        ]
    return tuple(found)
