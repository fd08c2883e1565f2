"""Check the ledger against itself: chain, what is charged, totals and the bills of closed months, all out of the rows.

Nothing that is kept beside the rows is trusted. Rows are streamed; what is recomputed is as large as a month has days,
models, outcomes and replicas. Of each chain the first difference is named: after it, nothing holds.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any, Final

import msgspec
from sqlalchemy import Column, Connection, RowMapping, Table, case, func, or_, select, union

from contracts.billing import BillingReport, ChainReport, LedgerDifference, VerifyReport
from contracts.usage import LifetimeRecord, Origin
from controlplane.closings import prices_of
from controlplane.ledger import booked_of
from controlplane.ledger_schema import (
    CLOSING_VALUES,
    CONFLICT_VALUES,
    LIFETIME_VALUES,
    REQUEST_VALUES,
    chains,
    closings,
    conflicts,
    device_totals,
    lifetime_records,
    owned_by,
    request_records,
    request_totals,
    runtime_totals,
)
from controlplane.months import Closed
from controlplane.policy.booking import DeviceKey, SumKey, book, device_sums, request_sums
from controlplane.policy.chain import Kind, digest_of, genesis
from controlplane.policy.rating import is_billable
from controlplane.sheet import Pricing, Sheet
from controlplane.totals import DEVICE_FIGURES, REQUEST_FIGURES

_ROWS: Final = 2_000
_VALUES: Final[Sequence[tuple[Kind, Table, Sequence[Column[Any]]]]] = (
    (Kind.REQUEST, request_records, REQUEST_VALUES),
    (Kind.LIFETIME, lifetime_records, LIFETIME_VALUES),
    (Kind.CONFLICT, conflicts, CONFLICT_VALUES),
    (Kind.CLOSING, closings, CLOSING_VALUES),
)
_SUBJECT: Final = {
    Kind.REQUEST: "request_id", Kind.LIFETIME: "runtime_id", Kind.CONFLICT: "subject", Kind.CLOSING: "month",
}  # fmt: skip

Link = tuple[int, Kind, RowMapping, Sequence[Any]]


def months_of(connection: Connection, tenant: str) -> list[str]:
    """Every month of which anything is there: rows without a chain, or a chain without rows, are looked at, too."""
    tables = (request_records, lifetime_records, conflicts, closings, chains, request_totals, device_totals)
    parts = [select(table.c.month).where(owned_by(table, tenant)).distinct() for table in tables]
    return sorted(connection.execute(union(*parts)).scalars())


def verify_ledger(connection: Connection, tenant: str, month: str | None) -> VerifyReport:
    """One month, or all that there are."""
    months = [month] if month is not None else months_of(connection, tenant)
    found = tuple(verify_month(connection, tenant, each) for each in months)
    replicas = () if month is not None else tuple(islice(_wrong_replicas(connection, tenant), 1))
    sound = not replicas and not any(each.differences for each in found)
    return VerifyReport(tenant=tenant, sound=sound, months=found, replicas=replicas)


def _wrong_replicas(connection: Connection, tenant: str) -> Iterator[LedgerDifference]:
    """What is kept of each replica's requests against what the rows make: sorted by the database, compared in step."""
    c, kept = request_records.c, runtime_totals.c
    each = (
        select(
            c.runtime_id,
            func.max(c.device_us).label("device_us"),
            func.max(c.completion_tokens).label("tokens"),
            func.min(c.ended_at_us).label("first_us"),
            func.max(c.ended_at_us).label("last_us"),
        )
        .where(c.tenant == tenant, c.runtime_id.is_not(None))
        .group_by(c.runtime_id, c.request_id)
        .subquery()
    )
    cost = case((or_(each.c.device_us > 0, each.c.tokens > 0), 1), else_=0)
    figures = (func.count(), func.sum(cost), func.sum(each.c.device_us), func.min(each.c.first_us),
               func.max(each.c.last_us))  # fmt: skip
    made = select(each.c.runtime_id, *figures).group_by(each.c.runtime_id).order_by(each.c.runtime_id)
    stored = (
        select(kept.runtime_id, kept.requests, kept.answered, kept.device_us, kept.first_at_us, kept.last_at_us)
        .where(kept.tenant == tenant)
        .order_by(kept.runtime_id)
    )
    rows = (connection.execute(query.execution_options(yield_per=_ROWS)) for query in (made, stored))
    for wanted, found in zip_longest(*rows):
        if wanted != found:
            subject = min(row[0] for row in (wanted, found) if row is not None)
            detail = "the totals of this replica's requests are not what the rows make"
            yield LedgerDifference(month="", subject=f"replica {subject}", detail=detail)


def verify_month(connection: Connection, tenant: str, month: str) -> ChainReport:
    """Recompute a tenant's month ("" is the platform's own) from its rows."""
    end = connection.execute(
        select(chains.c.links, chains.c.chain).where(chains.c.tenant == tenant, chains.c.month == month)
    ).first()
    check = _Month(connection, tenant, month)
    difference = check.run((end.links, end.chain) if end else (0, genesis(tenant, month).hex()))
    return ChainReport(
        month=month,
        links=check.links,
        chain=check.end.hex(),
        closed=check.closing is not None,
        differences=() if difference is None else (difference,),
    )


class _Month:
    """One pass over the links."""

    def __init__(self, connection: Connection, tenant: str, month: str) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self.links = 0
        self.end = genesis(tenant, month)
        self.closing: RowMapping | None = None
        self._closed = Closed(connection, {tenant}).of(tenant)
        self._requests: defaultdict[SumKey, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._devices: defaultdict[DeviceKey, list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def run(self, written_end: tuple[int, str]) -> LedgerDifference | None:
        """The first difference, in the order: links, end of the chain, totals, the closed bill."""
        for link, kind, row, values in self._rows():
            if (problem := self._check(link, kind, row, values)) is not None:
                return problem
        if (self.links, self.end.hex()) != written_end:
            return self._differs(
                "end",
                f"the chain ends with link {self.links}; {written_end[0]} links were written, or another last one",
            )
        return (
            self._compare(request_totals, SumKey.__slots__, REQUEST_FIGURES, self._requests)
            or self._compare(device_totals, DeviceKey.__slots__, DEVICE_FIGURES, self._devices)
            or (None if self.closing is None else self._check_bill(self.closing))
        )

    def _rows(self) -> Iterator[Link]:
        streams = [self._stream(kind, table, values) for kind, table, values in _VALUES]
        return heapq.merge(*streams, key=itemgetter(0))

    def _stream(self, kind: Kind, table: Table, values: Sequence[Column[Any]]) -> Iterator[Link]:
        query = (
            select(table)
            .where(owned_by(table, self._tenant), table.c.month == self._month)
            .order_by(table.c.link)
            .execution_options(yield_per=_ROWS)
        )
        names = [column.name for column in values]
        for row in self._connection.execute(query).mappings():
            yield row["link"], kind, row, [row[name] for name in names]

    def _check(self, link: int, kind: Kind, row: RowMapping, values: Sequence[Any]) -> LedgerDifference | None:
        subject = f"{kind} {row[_SUBJECT[kind]]}"
        if link != self.links + 1:
            return self._differs(
                subject, f"link {link} comes after link {self.links}: a row is missing, or one too many"
            )
        if self.closing is not None:
            return self._differs(subject, f"link {link} was added after the month was closed")
        self.end = digest_of(self.end, kind, values)
        if self.end.hex() != row["chain"]:
            return self._differs(subject, f"link {link}: the row, or one before it, is not what was written")
        self.links = link
        match kind:
            case Kind.REQUEST:
                return self._check_request(subject, row)
            case Kind.LIFETIME:
                life = LifetimeRecord(**{column.name: row[column.name] for column in LIFETIME_VALUES})
                for key, figures in device_sums(life, self._month).items():
                    _add(self._devices[key], figures)
            case Kind.CLOSING:
                self.closing = row
            case Kind.CONFLICT:
                pass
        return None

    def _check_request(self, subject: str, row: RowMapping) -> LedgerDifference | None:
        """Whether it is charged follows from all records of its request; of an activator's there is one, and it is."""
        booked = booked_of(row)
        if row["billable"] is not is_billable(booked.record):
            return self._differs(subject, f"billable is {row['billable']}; its outcome and tokens say otherwise")
        group = [booked]
        if booked.record.origin is Origin.ORPHAN or booked.replaces is not None or not booked.stands:
            name = request_records.c.tenant == row["tenant"], request_records.c.request_id == row["request_id"]
            group = [
                booked_of(other) for other in self._connection.execute(select(request_records).where(*name)).mappings()
            ]
            if book(group, self._closed) != group:
                return self._differs(subject, "which record of this request is charged is not what its records say")
        others = [replace(other, stands=False) for other in group if other.record != booked.record]
        for key, figures in request_sums([booked, *others]).items():
            _add(self._requests[key], figures)
        return None

    def _compare(
        self, table: Table, names: Sequence[str], figures: Sequence[str], sums: Mapping[Any, list[int]]
    ) -> LedgerDifference | None:
        """The totals that are kept against those of the rows."""
        query = select(table).where(table.c.tenant == self._tenant, table.c.month == self._month)
        kept = {
            tuple(row[name] for name in names): [row[name] for name in figures]
            for row in self._connection.execute(query).mappings()
        }
        made = {tuple(getattr(key, name) for name in names): sum_ for key, sum_ in sums.items() if any(sum_)}
        for key in sorted(kept.keys() | made.keys()):
            if (found := kept.get(key)) != (wanted := made.get(key)):
                what = ", ".join(str(part) for part in key[2:])
                return self._differs(f"total of day {what}", f"{list(figures)} are {found}; the rows make {wanted}")
        return None

    def _check_bill(self, closing: RowMapping) -> LedgerDifference | None:
        """The bill that was frozen against the one that the rows make at the frozen prices."""
        report = msgspec.json.decode(closing["report"], type=BillingReport)
        sheet = Sheet(Pricing(self._connection, prices_of(closing["prices"]), self._tenant, self._month))
        for key, figures in self._requests.items():
            sheet.add_requests(key.day, key.model, key.outcome, key.billable, *figures)
        for device, figures in self._devices.items():
            sheet.add_device_time(device.day, device.model, device.device_class, *figures)
        wanted = sheet.report(self._tenant, self._month, report.balance, report.open_runtimes, report.closed_at_us)
        if report != wanted:
            part = next(name for name in report.__struct_fields__ if getattr(report, name) != getattr(wanted, name))
            return self._differs("closing", f"the closed bill's {part} is not what the rows make at its prices")
        return None

    def _differs(self, subject: str, detail: str) -> LedgerDifference:
        return LedgerDifference(month=self._month, subject=subject, detail=detail)


def _add(sums: list[int], figures: Sequence[int]) -> None:
    for index, figure in enumerate(figures):
        sums[index] += figure
