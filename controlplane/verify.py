"""Check the ledger against itself: chain, what is charged, totals and the bills of closed months, all out of the rows.

Nothing that is kept beside the rows is trusted. Rows are streamed, each read once; what is kept meanwhile is a
`Recount`. Of each chain the first difference is named: after it, nothing holds.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from msgspec import UNSET, structs
from sqlalchemy import Column, Connection, Row, Table, func, select, union

from contracts.billing import BillingReport, ChainReport, LedgerDifference, VerifyReport
from contracts.usage import LifetimeRecord, Origin
from contracts.wire import decoder
from controlplane.closings import prices_of
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
    marks_of,
    owned_by,
    request_records,
    request_totals,
    step_totals,
)
from controlplane.months import Closed
from controlplane.policy.chain import Kind, digest_of, genesis
from controlplane.policy.rating import is_charged
from controlplane.recount import COUNTED, Differing, Recount, Uses
from controlplane.request_rows import book_all, kin_of, known_requests
from controlplane.sheet import Pricing, Sheet
from controlplane.store import streamed
from controlplane.totals import DEVICE_FIGURES, REQUEST_FIGURES, STEP_FIGURES

Tell = Callable[[int], None]  # that so many more rows are read

_ROWS: Final = 2_000
_MARKS: Final = tuple(request_records.c[name] for name in ("stands", "billable", "replaces", "once", "degraded"))
_STREAMS: Final[Sequence[tuple[Kind, Table, Sequence[Column[Any]], Sequence[Column[Any]]]]] = (
    (Kind.REQUEST, request_records, REQUEST_VALUES, _MARKS),
    (Kind.LIFETIME, lifetime_records, LIFETIME_VALUES, ()),
    (Kind.CONFLICT, conflicts, CONFLICT_VALUES, ()),
    (Kind.CLOSING, closings, CLOSING_VALUES, ()),
)
_SUBJECT: Final = {Kind.REQUEST: "request_id", Kind.LIFETIME: "runtime_id", Kind.CONFLICT: "subject"}
# A row of a stream is its link, its digest, what that digest covers, and marks.
_LINK, _CHAIN = 0, 1
_COVERED: Final = {kind: slice(2, 2 + len(values)) for kind, _, values, _ in _STREAMS}
_DIGESTED: Final = slice(-2, None)  # of a request: the last of its marks, in its digest where set; the others are not
_REQUEST_NAMES: Final = ("link", "chain", *(column.name for column in (*REQUEST_VALUES, *_MARKS)))
_counted: Final = itemgetter(*(_REQUEST_NAMES.index(name) for name in COUNTED))
_judged: Final = itemgetter(
    *(_REQUEST_NAMES.index(name) for name in ("request_id", "origin", "outcome", "completion_tokens"))
)
_marked: Final = itemgetter(*(_REQUEST_NAMES.index(column.name) for column in _MARKS))

Link = tuple[int, Kind, Row[Any]]


def months_of(connection: Connection, tenant: str) -> list[str]:
    """Every month of which anything is there: rows without a chain, or a chain without rows, are looked at, too."""
    records = (request_records, lifetime_records, conflicts, closings, chains)
    tables = (*records, request_totals, step_totals, device_totals)
    parts = [select(table.c.month).where(owned_by(table, tenant)).distinct() for table in tables]
    return sorted(connection.execute(union(*parts)).scalars())


def links_of(connection: Connection, tenant: str, months: Sequence[str]) -> int:
    """About how many rows there are to read."""
    c = chains.c
    query = select(func.coalesce(func.sum(c.links), 0)).where(c.tenant == tenant, c.month.in_(months))
    return int(connection.execute(query).scalar_one())


def verify_ledger(
    connection: Connection, tenant: str, month: str | None, tell: Tell = lambda rows: None
) -> VerifyReport:
    """One month, or all that there are and the totals by replica."""
    months = [month] if month is not None else months_of(connection, tenant)
    uses = Uses(connection, tenant) if month is None else None
    found = tuple(verify_month(connection, tenant, each, uses, tell) for each in months)
    sound = not any(each.differences for each in found)
    # A month that is not sound was not read to its end: of its replicas nothing more can be said.
    wrong = uses.differing() if uses is not None and sound else iter(())
    replicas = tuple(_wrong_replica(each) for each in islice(wrong, 1))
    return VerifyReport(tenant=tenant, sound=sound and not replicas, months=found, replicas=replicas)


def _wrong_replica(differing: Differing) -> LedgerDifference:
    detail = "the totals of this replica's requests are not what the rows make"
    return LedgerDifference(month="", subject=f"replica {differing.key[0]}", detail=detail)


def verify_month(
    connection: Connection, tenant: str, month: str, uses: Uses | None = None, tell: Tell = lambda rows: None
) -> ChainReport:
    """Recompute a tenant's month ("" is the platform's own) from its rows."""
    end = connection.execute(
        select(chains.c.links, chains.c.chain).where(chains.c.tenant == tenant, chains.c.month == month)
    ).first()
    check = _Month(connection, tenant, month, uses)
    difference = check.run((end.links, end.chain) if end else (0, genesis(tenant, month).hex()), tell)
    return ChainReport(
        month=month,
        links=check.links,
        chain=check.end.hex(),
        closed=check.closing is not None,
        differences=() if difference is None else (difference,),
    )


class _Month:
    """One pass over the links."""

    def __init__(self, connection: Connection, tenant: str, month: str, uses: Uses | None) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self.links = 0
        self.end = genesis(tenant, month)
        self.closing: dict[str, Any] | None = None
        self._shut = Closed(connection, {tenant})
        self._recount = Recount(connection, tenant, month, uses)

    def run(self, written_end: tuple[int, str], tell: Tell) -> LedgerDifference | None:
        """The first difference, in the order: links, end of the chain, totals, the closed bill."""
        for link, kind, row in self._rows():
            if (problem := self._check(link, kind, row)) is not None:
                return problem
            if link % _ROWS == 0:
                tell(_ROWS)
        if (self.links, self.end.hex()) != written_end:
            return self._differs(
                "end",
                f"the chain ends with link {self.links}; {written_end[0]} links were written, or another last one",
            )
        return (
            self._first(self._recount.differing_requests(), REQUEST_FIGURES)
            or self._first(self._recount.differing_steps(), STEP_FIGURES)
            or self._first(self._recount.differing_devices(), DEVICE_FIGURES)
            or (None if self.closing is None else self._check_bill(self.closing))
        )

    def _rows(self) -> Iterator[Link]:
        streams = [self._stream(kind, table, (*values, *marks)) for kind, table, values, marks in _STREAMS]
        return heapq.merge(*streams, key=itemgetter(0))

    def _stream(self, kind: Kind, table: Table, columns: Sequence[Column[Any]]) -> Iterator[Link]:
        query = (
            select(table.c.link, table.c.chain, *columns)
            .where(owned_by(table, self._tenant), table.c.month == self._month)
            .order_by(table.c.link)
        )
        for row in streamed(self._connection, query, _ROWS):
            yield row[_LINK], kind, row

    def _check(self, link: int, kind: Kind, row: Row[Any]) -> LedgerDifference | None:
        if link != self.links + 1:
            return self._differs(
                self._subject(kind, row),
                f"link {link} comes after link {self.links}: a row is missing, or one too many",
            )
        if self.closing is not None:
            return self._differs(self._subject(kind, row), f"link {link} was added after the month was closed")
        values = row[_COVERED[kind]]
        marks = marks_of(*row[_DIGESTED]) if kind is Kind.REQUEST else ()
        self.end = digest_of(self.end, kind, (*values, *marks))
        if self.end.hex() != row[_CHAIN]:
            return self._differs(
                self._subject(kind, row), f"link {link}: the row, or one before it, is not what was written"
            )
        self.links = link
        match kind:
            case Kind.REQUEST:
                return self._check_request(row)
            case Kind.LIFETIME:
                named = {column.name: value for column, value in zip(LIFETIME_VALUES, values, strict=True)}
                self._recount.add_lifetime(LifetimeRecord(**named))
            case Kind.CLOSING:
                self.closing = {column.name: value for column, value in zip(CLOSING_VALUES, values, strict=True)}
            case Kind.CONFLICT:
                pass
        return None

    def _check_request(self, row: Row[Any]) -> LedgerDifference | None:
        """Whether it is charged follows from all records of its request, and of those that are one with it; of an
        activator's alone there is one, and it is."""
        request_id, origin, outcome, tokens = _judged(row)
        stands, billable, replaces, once, _ = _marked(row)
        if billable is not is_charged(outcome, tokens):
            return self._differs(
                self._subject(Kind.REQUEST, row), f"billable is {billable}; its outcome and tokens say otherwise"
            )
        if origin == Origin.ORPHAN or replaces is not None or not stands or once is not None:
            name = self._tenant, request_id
            known = known_requests(self._connection, [name])
            known |= kin_of(self._connection, known)
            if book_all(known, self._shut)[name] != known[name]:
                return self._differs(
                    self._subject(Kind.REQUEST, row),
                    "which record of this request is charged is not what its records say",
                )
        self._recount.add_request(*_counted(row))
        return None

    def _first(self, differing: Iterable[Differing], figures: Sequence[str]) -> LedgerDifference | None:
        """Of the totals that are kept, the first that the rows don't make."""
        for each in differing:
            what = ", ".join(str(part) for part in each.key)
            detail = f"{list(figures)} are {each.kept}; the rows make {each.made}"
            return self._differs(f"total of day {what}", detail)
        return None

    def _check_bill(self, closing: dict[str, Any]) -> LedgerDifference | None:
        """The bill that was frozen against the one that the rows make at the frozen prices."""
        report = decoder(BillingReport).decode(closing["report"])
        sheet = Sheet(Pricing(self._connection, prices_of(closing["prices"]), self._tenant, self._month))
        for (day, model, outcome, billable), sums in self._recount.requests.items():
            sheet.add_requests(day, model, outcome, billable, *sums)
        for (day, step), sums in self._recount.steps.items():
            sheet.add_step(day, step, *sums)
        for (day, model, device_class), sums in self._recount.devices.items():
            sheet.add_device_time(day, model, device_class, *sums)
        wanted = sheet.report(self._tenant, self._month, report.balance, report.open_runtimes, report.closed_at_us)
        if report.degraded is UNSET:
            wanted = structs.replace(wanted, degraded=UNSET)
        if report != wanted:
            part = next(name for name in report.__struct_fields__ if getattr(report, name) != getattr(wanted, name))
            return self._differs("closing", f"the closed bill's {part} is not what the rows make at its prices")
        return None

    def _subject(self, kind: Kind, row: Row[Any]) -> str:
        name = self._month if kind is Kind.CLOSING else row._mapping[_SUBJECT[kind]]
        return f"{kind} {name}"

    def _differs(self, subject: str, detail: str) -> LedgerDifference:
        return LedgerDifference(month=self._month, subject=subject, detail=detail)
