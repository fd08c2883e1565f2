"""The ledger: enters usage records, each once, and stores them.

`policy/rating.py` prices them, `policy/discrepancies.py` reports missing ones, `policy/record_precedence.py` decides
which of several is charged. Functions take a connection within a transaction; `Ledger` runs them on the database's
threads.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, func, select, update

from controlplane.db.chained_log import ChainWriter
from controlplane.db.database import Database
from controlplane.db.dialects import upserts
from controlplane.db.hash_chain_policy import RowKind
from controlplane.db.ledger_schema import (
    IN_USE,
    LIFETIME_VALUES,
    UNKNOWN,
    closings,
    journal_position,
    lifetime_records,
    request_records,
)
from controlplane.ledger import running_replicas
from controlplane.ledger.closed_months import ClosedMonths, journal_closing
from controlplane.ledger.ledger_journal import JournalEntry, LedgerJournal
from controlplane.ledger.policy.booking import LedgerRecord
from controlplane.ledger.policy.record_precedence import (
    RecordConflict,
    RecordDecision,
    RecordStatus,
    choose_charged_record,
    decide_lifetime_record,
    decide_request_record,
)
from controlplane.ledger.received_sequences import ConflictWriter, ReceivedSequences, chunks, insert_rows
from controlplane.ledger.request_rows import (
    RecordGroups,
    RequestKey,
    known_requests,
    mark_all_charged,
    request_row,
    requests_with_same_key,
    update_charge,
)
from controlplane.ledger.usage_batches import Unreadable, check_size
from controlplane.ledger.usage_totals import UsageTotals
from kelvin.contracts.accounting.billing_reports import ClosingReport
from kelvin.contracts.accounting.usage import UNSEEN_END_PREFIX, LifetimeRecord, RequestRecord
from kelvin.contracts.errors import InvalidRequest, NotFound, Refused
from kelvin.contracts.serving.control_messages import LifetimeBatch, RequestBatch, RunningLifetimes, TimelineAnswer
from kelvin.contracts.timeline import Stage

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", RequestRecord, LifetimeRecord)

_LIFETIME_FIELDS: Final = LifetimeRecord.__struct_fields__
_lifetime_values: Final = attrgetter(*(column.name for column in LIFETIME_VALUES))
_UPSERT_POSITION: Final = upserts(
    journal_position,
    lambda new: new.on_conflict_do_update(index_elements=["id"], set_={"position": new.excluded.position}),
)
_COLD_STAGES: Final = frozenset({Stage.PROMOTED, Stage.LEASED, Stage.BOUND, Stage.READY})


@dataclass(frozen=True, slots=True)
class Appended:
    """Result of a batch. `conflicting` and `unreadable` records are kept aside, and make the balance fail.

    Records that were kept aside before are not counted again.
    """

    new: int
    duplicate: int
    conflicting: int
    unreadable: int = 0


class Ledger:
    """The ledger. Calls are durable on return. Repeated and overlapping batches change nothing."""

    def __init__(self, database: Database, journal: LedgerJournal | None = None) -> None:
        """With a journal, every entry is in the journal, too, before it is acknowledged."""
        self._database = database
        self._journal = journal
        self.kept_aside = 0  # records since this process started

    def __repr__(self) -> str:
        return f"<Ledger {self._database!r}>"

    @property
    def database(self) -> Database:
        """The database, for readers that need a snapshot of their own."""
        return self._database

    async def append_requests(self, batch: RequestBatch, unreadable: Sequence[Unreadable] = ()) -> None:
        """Enter the records, and keep the unreadable ones aside, in one transaction.

        Raises Refused(InvalidRequest) for too many.
        """
        check_size(len(batch.records) + len(unreadable))
        enter = partial(self._enter_and_journal, append_requests, records=batch.records, unreadable=unreadable)
        self._log_kept_aside(await self._write(enter, repeated=True), unreadable)

    async def append_lifetimes(self, batch: LifetimeBatch, unreadable: Sequence[Unreadable] = ()) -> None:
        """Enter the records, and keep the unreadable ones aside, in one transaction.

        Raises Refused(InvalidRequest) for too many.
        """
        check_size(len(batch.records) + len(unreadable))
        enter = partial(self._enter_and_journal, append_lifetimes, records=batch.records, unreadable=unreadable)
        self._log_kept_aside(await self._write(enter, repeated=True), unreadable)

    async def record_running_replicas(self, batch: RunningLifetimes, now_us: int) -> None:
        """Store reports of running replicas that arrived at `now_us` (wall clock). Raises Refused(InvalidRequest)."""
        check_size(len(batch.records))
        _check_sources(batch.records)
        note = partial(running_replicas.store_reports, records=batch.records, now_us=now_us)
        await self._database.write(note, repeated=True)

    async def record_lost_replicas(self, before_us: int) -> int:
        """Record the lives of replicas that have not reported since `before_us` (wall clock, LOST_AFTER_S ago). Return
        their number. A report that contradicts the ledger, or can't be read, is kept aside. Its replica is forgotten,
        too.
        """

        def cut(connection: Connection) -> tuple[Appended, list[Unreadable]]:
            running_replicas.clamp_report_times(connection, before_us + int(running_replicas.LOST_AFTER_S * 1e6))
            records, unreadable = running_replicas.read_final_records(connection, before_us)
            appended = self._enter_and_journal(append_lifetimes, connection, records, unreadable)
            ended = {record.runtime_id for record in records} | {each.subject for each in unreadable}
            running_replicas.delete_reports(connection, ended)
            return appended, unreadable

        appended, unreadable = await self._write(cut, repeated=True)
        self._log_kept_aside(appended, unreadable)
        return appended.new

    async def write_closing(self, close: Callable[[Connection], ClosingReport]) -> ClosingReport:
        """Run `close` in a transaction. Write the bill to the journal, unless the month was closed before."""

        def closed(connection: Connection) -> ClosingReport:
            count = select(func.count()).select_from(closings)
            before = connection.execute(count).scalar_one()
            closing = close(connection)
            if self._journal is not None and connection.execute(count).scalar_one() != before:
                self._append_to_journal(connection, self._journal, [journal_closing(connection, closing.report)])
            return closing

        return await self._write(closed)

    async def write_due_marks(self) -> None:
        """Write the marks that the journal needs (see `ledger_journal.py`). Without a journal, store that none is in
        use.

        Raises Refused if journal or database is unavailable, and OlderDatabase.
        """
        if self._journal is None:
            leave = update(journal_position).where(journal_position.c.id == IN_USE).values(position=0)
            await self._database.write(lambda connection: connection.execute(leave), repeated=True)
        else:
            await self._database.write(
                partial(self._append_to_journal, journal=self._journal, entries=()), repeated=True
            )

    async def _write(self, work: Callable[[Connection], T], *, repeated: bool = False) -> T:
        """Run a transaction that writes to the journal. If it fails, mark its entries as dropped.

        If that fails, too, the next transaction writes the mark first.
        """
        before = 0 if self._journal is None else self._journal.committed
        try:
            return await self._database.write(work, repeated=repeated)
        except Exception:
            if self._journal is not None and self._journal.committed != before:
                with suppress(Exception):
                    await self.write_due_marks()
            raise

    def _enter_and_journal(
        self,
        enter: Callable[[Connection, Sequence[R]], Appended],
        connection: Connection,
        records: Sequence[R],
        unreadable: Sequence[Unreadable],
    ) -> Appended:
        """Enter records in a transaction and append them to the journal. Committed records are in the journal, and
        records that the journal can't take are not entered.
        """
        appended = enter(connection, records)
        if unreadable:
            appended = replace(appended, unreadable=keep_aside(connection, unreadable))
        if self._journal is not None and (records or unreadable):
            self._append_to_journal(connection, self._journal, [*records, *unreadable])
        return appended

    def _log_kept_aside(self, appended: Appended, unreadable: Sequence[Unreadable]) -> None:
        self.kept_aside += appended.conflicting + appended.unreadable
        if appended.conflicting:
            log.error("usage records contradict the ledger; they are kept aside", extra={"count": appended.conflicting})
        for each in unreadable if appended.unreadable else ():
            context = {"tenant": each.tenant, "source": each.source, "sequence": each.sequence, "error": each.reason}
            log.error("a usage record can't be read; it is kept aside", extra={"subject": each.subject, **context})

    @staticmethod
    def _append_to_journal(connection: Connection, journal: LedgerJournal, entries: Sequence[JournalEntry]) -> None:
        """Append due marks and the entries, and store the journal's position. See `ledger_journal.py`."""
        c = journal_position.c
        query = select(c.id, c.position).where(c.id.in_((journal.number, IN_USE)))
        known = {row.id: row.position for row in connection.execute(query)}
        position, in_use = known.get(journal.number), known.get(IN_USE)
        journal.skip_to(position)
        if position is not None:
            journal.drop_after(position)
        elif in_use is None:  # the database is new and was not restored, so the journal must be new, too
            journal.check(0)
        if in_use not in (None, UNKNOWN, journal.number):
            journal.mark_gap()
        if entries:
            journal.append(entries)
        rows = [{"id": journal.number, "position": journal.committed}, {"id": IN_USE, "position": journal.number}]
        if changed := [row for row in rows if known.get(row["id"]) != row["position"]]:
            connection.execute(_UPSERT_POSITION[connection.dialect.name], changed)

    async def timeline_of(self, tenant: str, request_id: str) -> TimelineAnswer:
        """Return the timeline of an ended request; it has no stamps if none were recorded. Raises Refused(NotFound)."""
        found = await self._database.read(lambda connection: timeline_of(connection, tenant, request_id))
        if found is None:
            raise Refused(NotFound("request", request_id[:128]))
        return found


def append_requests(connection: Connection, records: Sequence[RequestRecord]) -> Appended:
    """Enter the records, in any order and however often.

    Links of a chain are in the order of the records, not of the batches, because a replay of the journal has to make
    the same chains.
    """
    arrived = ReceivedSequences(connection, {record.source for record in records})
    closed_months = ClosedMonths(connection, {record.tenant for record in records})
    known = known_requests(connection, {(record.tenant, record.request_id) for record in records})
    groups = {name: list(booked) for name, booked in known.items()}
    touched: RecordGroups = {}
    aside, placements = ConflictWriter(), defaultdict[RecordDecision, int](int)
    links: list[RequestKey | str] = []  # requests, and digests of records that are kept aside
    for record in records:
        name = record.tenant, record.request_id
        group = groups[name]
        is_sequence_taken = arrived.has(record.source, record.sequence)
        placement = decide_request_record([booked.record for booked in group], record, sequence_taken=is_sequence_taken)
        if placement is RecordStatus.NEW:
            group.append(LedgerRecord(record, closed_months.month_for(record.tenant, record.ended_at_us)))
            touched[name] = group
            links.append(name)
        elif isinstance(placement, RecordConflict):
            subject = f"{record.request_id} ({record.source}#{record.sequence})"
            links.append(aside.add(record, subject, record.ended_at_us, placement))
        placements[placement] += 1
        arrived.add(record.source, record.sequence, record.ended_at_us)
    totals, new = UsageTotals(connection), dict[RequestKey, Iterator[LedgerRecord]]()
    same_key_requests = requests_with_same_key(connection, touched)
    known |= same_key_requests
    for name, after in mark_all_charged(touched | same_key_requests, closed_months).items():
        before = known[name]
        if before == after:  # a request with the same idempotency key whose charge has not changed
            continue
        totals.add_requests(before, after)
        new[name] = iter(after[len(before) :])
        for old, now in zip(before, after, strict=False):
            if old != now:
                update_charge(connection, now)
    chains, rows = ChainWriter(connection), list[tuple[Any, ...]]()
    aside.drop_stored(connection)
    for link in links:
        if isinstance(link, str):
            aside.link(link, chains)
        else:
            rows.append(request_row(next(new[link]), chains))
    insert_rows(connection, request_records, rows)
    aside_count = aside.write(connection)
    totals.write()
    chains.write()
    arrived.write(connection)
    return Appended(placements[RecordStatus.NEW], placements[RecordStatus.DUPLICATE], aside_count)


def append_lifetimes(connection: Connection, records: Sequence[LifetimeRecord]) -> Appended:
    """Enter the records, in any order and however often. Links are ordered as in `append_requests`."""
    arrived = ReceivedSequences(connection, {record.source for record in records})
    closed_months = ClosedMonths(connection, {record.tenant or "" for record in records})
    known = _known_lifetimes(connection, {record.runtime_id for record in records})
    totals = UsageTotals(connection)
    aside, placements = ConflictWriter(), defaultdict[RecordDecision, int](int)
    links: list[LifetimeRecord | str] = []
    for record in records:
        is_sequence_taken = arrived.has(record.source, record.sequence)
        placement = decide_lifetime_record(known.get(record.runtime_id), record, sequence_taken=is_sequence_taken)
        if placement is RecordStatus.NEW:
            known[record.runtime_id] = record
            links.append(record)
        elif isinstance(placement, RecordConflict):
            subject = f"{record.runtime_id} ({record.source}#{record.sequence})"
            links.append(aside.add(record, subject, record.died_at_us, placement))
        placements[placement] += 1
        arrived.add(record.source, record.sequence, record.died_at_us)
    chains, rows = ChainWriter(connection), list[tuple[Any, ...]]()
    aside.drop_stored(connection)
    for link in links:
        if isinstance(link, str):
            aside.link(link, chains)
            continue
        month = closed_months.month_for(link.tenant or "", link.died_at_us)
        values = _lifetime_values(link)
        rows.append((*values, month, *chains.add((link.tenant or "", month), (RowKind.LIFETIME, *values))))
        totals.add_lifetime(link, month)
    insert_rows(connection, lifetime_records, rows)
    running_replicas.delete_reports(connection, known)
    aside_count = aside.write(connection)
    totals.write()
    chains.write()
    arrived.write(connection)
    return Appended(placements[RecordStatus.NEW], placements[RecordStatus.DUPLICATE], aside_count)


def keep_aside(connection: Connection, unreadable: Sequence[Unreadable]) -> int:
    """Store unreadable records as links of their tenants' chains. Return how many were new."""
    chains, aside = ChainWriter(connection), ConflictWriter()
    arrived = ReceivedSequences(connection, {each.source for each in unreadable if each.source})
    digests = []
    for each in unreadable:
        digests.append(aside.add_unreadable(each.raw, each.tenant, each.subject, each.at_us, each.reason))
        if each.source:
            arrived.add(each.source, each.sequence, each.at_us)
    aside.drop_stored(connection)
    for digest in digests:
        aside.link(digest, chains)
    new = aside.write(connection)
    chains.write()
    arrived.write(connection)
    return new


def timeline_of(connection: Connection, tenant: str, request_id: str) -> TimelineAnswer | None:
    """Return the timeline of the best record of the request; None without a record."""
    found = known_requests(connection, [(tenant, request_id)])[tenant, request_id]
    if not found:
        return None
    record = choose_charged_record([booked.record for booked in found])
    stamps = record.timeline or ()
    return TimelineAnswer(
        request_id=request_id,
        model=record.model,
        version=record.version,
        cold=any(stamp.stage in _COLD_STAGES for stamp in stamps),
        stamps=stamps,
    )


def _check_sources(records: Sequence[LifetimeRecord]) -> None:
    for record in records:
        if record.source.startswith(UNSEEN_END_PREFIX):  # reserved for lives that the ledger ends itself
            raise Refused(InvalidRequest("source", record.source[:128], f"must not begin with {UNSEEN_END_PREFIX!r}"))


def _known_lifetimes(connection: Connection, names: Collection[str]) -> dict[str, LifetimeRecord]:
    known = {}
    for chunk in chunks(sorted(names)):
        query = select(lifetime_records).where(lifetime_records.c.runtime_id.in_(chunk))
        for row in connection.execute(query).mappings():
            known[row["runtime_id"]] = LifetimeRecord(**{field: row[field] for field in _LIFETIME_FIELDS})
    return known
