"""Track, for a batch of usage records, which sequences of which source arrived, and which records conflict.

Stored state is read once and written once, in the transaction of the batch.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Column, Connection, Dialect, String, Table, delete, insert, select, update

from controlplane.db.chained_log import ChainWriter
from controlplane.db.hash_chain_policy import RowKind
from controlplane.db.ledger_schema import conflicts, received, sources
from controlplane.db.nul_characters import replace_nul
from controlplane.ledger.closed_months import ClosedMonths
from controlplane.ledger.policy.record_precedence import MAX_VALUE, RecordConflict
from controlplane.ledger.policy.sequence_ranges import Range, add_to_ranges, covers
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.wire import encode

T = TypeVar("T")

_MAX_QUERY_NAMES: Final = 500  # names per query


class ReceivedSequences:
    """Sequences and times of a batch's sources, with what arrived from them before."""

    def __init__(self, connection: Connection, names: Collection[str]) -> None:
        names = {_fit_column(name, received.c.source) for name in names}
        self._known: dict[str, list[Range]] = {name: [] for name in names}
        self._new: defaultdict[str, set[int]] = defaultdict(set)
        self._spans: dict[str, tuple[int, int]] = {}
        for chunk in chunks(sorted(names)):
            rows = connection.execute(select(received).where(received.c.source.in_(chunk)).order_by(received.c.first))
            for row in rows.mappings():
                self._known[row["source"]].append((row["first"], row["last"]))

    def has(self, source: str, sequence: int) -> bool:
        """Return whether the sequence arrived before, in this batch or another."""
        source = _fit_column(source, received.c.source)
        return sequence in self._new[source] or covers(self._known[source], sequence)

    def add(self, source: str, sequence: int, at_us: int) -> None:
        """Add a sequence that has arrived, with the end time of its record."""
        source = _fit_column(source, received.c.source)
        if 0 < sequence <= MAX_VALUE:
            self._new[source].add(sequence)
        at_us = _clamp_time_us(at_us)
        first_us, last_us = self._spans.get(source, (at_us, at_us))
        self._spans[source] = min(first_us, at_us), max(last_us, at_us)

    def write(self, connection: Connection) -> None:
        """Store the ranges and times that changed."""
        for source, sequences in self._new.items():
            merged = add_to_ranges(self._known[source], sequences)
            if merged == self._known[source]:
                continue
            removed = [first for first, _ in set(self._known[source]) - set(merged)]
            for chunk in chunks(removed):
                connection.execute(delete(received).where(received.c.source == source, received.c.first.in_(chunk)))
            added = sorted(set(merged) - set(self._known[source]))
            insert_rows(connection, received, [(source, first, last) for first, last in added])
        for source, (first_us, last_us) in self._spans.items():
            self._write_span(connection, source, first_us, last_us)

    def _write_span(self, connection: Connection, source: str, first_us: int, last_us: int) -> None:
        found = connection.execute(select(sources).where(sources.c.source == source)).mappings().first()
        if found is None:
            row = {"source": source, "first_at_us": first_us, "last_at_us": last_us}
            connection.execute(insert(sources).values(row))
        elif first_us < found["first_at_us"] or last_us > found["last_at_us"]:
            span = {"first_at_us": min(first_us, found["first_at_us"]), "last_at_us": max(last_us, found["last_at_us"])}
            connection.execute(update(sources).where(sources.c.source == source).values(span))


class _ConflictRow(NamedTuple):
    """The CONFLICT_VALUES of a record that was not entered."""

    digest: str
    tenant: str | None
    subject: str
    at_us: int
    reason: str
    record: str


class ConflictWriter:
    """Stores the records of a batch that are kept aside."""

    def __init__(self) -> None:
        self._rows: dict[str, _ConflictRow] = {}
        self._linked: list[tuple[Any, ...]] = []
        self._closed_months: ClosedMonths | None = None

    def add(self, record: RequestRecord | LifetimeRecord, subject: str, at_us: int, conflict: RecordConflict) -> str:
        """Keep a record aside, with the reason. Return its digest."""
        raw = encode(record)
        return self._keep(hashlib.sha256(raw).hexdigest(), record.tenant, subject, at_us, conflict.reason, raw)

    def add_unreadable(self, raw: bytes, tenant: str | None, subject: str, at_us: int, reason: str) -> str:
        """Keep unreadable bytes aside, with the reason. Return a digest of subject and bytes."""
        digest = hashlib.sha256(subject.encode() + b"\n" + raw).hexdigest()
        return self._keep(digest, tenant, subject, at_us, reason, raw)

    def _keep(self, digest: str, tenant: str | None, subject: str, at_us: int, reason: str, raw: bytes) -> str:
        # A conflict without a tenant goes to the platform's chain.
        tenant = _fit_column(tenant, conflicts.c.tenant) if tenant else None
        subject = _fit_column(subject, conflicts.c.subject)
        text = replace_nul(raw.decode(errors="replace"))
        self._rows.setdefault(
            digest, _ConflictRow(digest, tenant, subject, _clamp_time_us(at_us), replace_nul(reason), text)
        )
        return digest

    def drop_stored(self, connection: Connection) -> None:
        """Forget records that are stored already, and look up closed months of the others. Call it before `link`."""
        for chunk in chunks(sorted(self._rows)):
            known = select(conflicts.c.digest).where(conflicts.c.digest.in_(chunk))
            for digest in connection.execute(known).scalars():
                del self._rows[digest]
        if self._rows:
            # Use the stored name: a record's own may be too long for any tenant.
            self._closed_months = ClosedMonths(connection, {row.tenant or "" for row in self._rows.values()})

    def link(self, digest: str, chains: ChainWriter) -> None:
        """Make the record the next link of its chain, unless it is stored or linked already."""
        if (row := self._rows.pop(digest, None)) is not None:
            assert self._closed_months is not None, "call drop_stored first"
            tenant = row.tenant or ""
            month = self._closed_months.month_for(tenant, row.at_us)
            self._linked.append((*row, month, *chains.add((tenant, month), (RowKind.CONFLICT, *row))))

    def write(self, connection: Connection) -> int:
        """Store the linked records. Return their number."""
        insert_rows(connection, conflicts, self._linked)
        return len(self._linked)


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, each with a value per column of the table, in its order. Does nothing without rows.

    They go to the driver unchanged, because binding each value by name would cost more than the insert.
    """
    if rows:
        connection.exec_driver_sql(_insertion(table, connection.dialect), list(rows))


@lru_cache(maxsize=32)
def _insertion(table: Table, dialect: Dialect) -> str:
    compiled = insert(table).compile(dialect=dialect)
    assert compiled.positional, f"{dialect.name} takes parameters by name"
    return str(compiled)


def chunks(values: Sequence[T]) -> Iterable[Sequence[T]]:
    """Split the values so that one query can name each part."""
    return (values[start : start + _MAX_QUERY_NAMES] for start in range(0, len(values), _MAX_QUERY_NAMES))


def _fit_column(word: str, column: Column[Any]) -> str:
    """Return the word cut to the column's length, without NUL characters."""
    assert isinstance(column.type, String)
    return replace_nul(word)[: column.type.length]


def _clamp_time_us(at_us: int) -> int:
    """Return the time within what the database can store, so that a damaged time does not keep its record out."""
    return min(max(at_us, 0), MAX_VALUE)
