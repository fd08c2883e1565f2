"""The ledger: takes usage records, each once, and keeps them. What they cost is `rating`'s work, whether all are there
`balance`'s; which one counts is `standing`'s.

Every function takes a connection within a transaction; `Ledger` runs them on the database's threads.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, RowMapping, select, tuple_, update

from contracts.control import LifetimeBatch, RequestBatch, TimelineAnswer
from contracts.errors import InvalidRequest, NotFound, Refused
from contracts.timeline import Stage, Stamp
from contracts.usage import LifetimeRecord, Origin, RequestRecord
from contracts.wire import encode
from controlplane.arrivals import Arrivals, Conflicts, chunks, insert_rows
from controlplane.ledger_schema import ensure_ledger, lifetime_records, request_records
from controlplane.policy.rating import is_billable
from controlplane.policy.standing import Conflict, Known, Placement, place_lifetime, place_request, standing
from controlplane.store import Database

log = logging.getLogger(__name__)

MAX_BATCH: Final = 5_000
_REQUEST_FIELDS: Final = tuple(field for field in RequestRecord.__struct_fields__ if field != "timeline")
_LIFETIME_FIELDS: Final = LifetimeRecord.__struct_fields__
_COLD: Final = frozenset({Stage.PROMOTED, Stage.LEASED, Stage.BOUND, Stage.READY})


@dataclass(frozen=True, slots=True)
class Appended:
    """What a batch came to. `conflicting` records are kept aside and make the balance fail."""

    new: int
    duplicate: int
    conflicting: int


class Ledger:
    """Durable on return. Repeats, and batches that overlap, change nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        ensure_ledger(database.engine)

    def __repr__(self) -> str:
        return f"<Ledger {self._database!r}>"

    @property
    def database(self) -> Database:
        """For those who read the ledger's tables over a snapshot of their own."""
        return self._database

    async def append_requests(self, batch: RequestBatch) -> None:
        """Enter the records in one transaction. Raises Refused(InvalidRequest) for more than MAX_BATCH."""
        _check_size(batch.records)
        _tell(await self._database.write(lambda connection: append_requests(connection, batch.records)))

    async def append_lifetimes(self, batch: LifetimeBatch) -> None:
        """Likewise."""
        _check_size(batch.records)
        _tell(await self._database.write(lambda connection: append_lifetimes(connection, batch.records)))

    async def timeline_of(self, tenant: str, request_id: str) -> TimelineAnswer:
        """Of a request that ended; without stamps where it had nothing to tell. Raises Refused(NotFound)."""
        found = await self._database.read(lambda connection: timeline_of(connection, tenant, request_id))
        if found is None:
            raise Refused(NotFound("request", request_id[:128]))
        return found


def append_requests(connection: Connection, records: Sequence[RequestRecord]) -> Appended:
    """Enter the records, in any order and however often."""
    arrived = Arrivals(connection, {record.source for record in records})
    known = _known_requests(connection, {(record.tenant, record.request_id) for record in records})
    fresh: list[RequestRecord] = []
    aside, placements = Conflicts(), defaultdict[Placement, int](int)
    for record in records:
        group = known[record.tenant, record.request_id]
        taken = arrived.has(record.source, record.sequence)
        placement = place_request(group, record, sequence_taken=taken)
        if placement is Known.NEW:
            group.append(record)
            fresh.append(record)
        elif isinstance(placement, Conflict):
            aside.add(record, f"{record.request_id} ({record.source}#{record.sequence})", record.ended_at_us, placement)
        placements[placement] += 1
        arrived.add(record.source, record.sequence, record.ended_at_us)
    insert_rows(connection, request_records, [_request_row(record, known) for record in fresh])
    for tenant, request_id in {(record.tenant, record.request_id) for record in fresh}:
        group = known[tenant, request_id]
        if len(group) > 1:
            _set_standing(connection, group)
    arrived.write(connection)
    return Appended(placements[Known.NEW], placements[Known.DUPLICATE], aside.write(connection))


def append_lifetimes(connection: Connection, records: Sequence[LifetimeRecord]) -> Appended:
    """Enter the records, in any order and however often."""
    arrived = Arrivals(connection, {record.source for record in records})
    known = _known_lifetimes(connection, {record.runtime_id for record in records})
    aside, placements = Conflicts(), defaultdict[Placement, int](int)
    fresh = []
    for record in records:
        taken = arrived.has(record.source, record.sequence)
        placement = place_lifetime(known.get(record.runtime_id), record, sequence_taken=taken)
        if placement is Known.NEW:
            known[record.runtime_id] = record
            fresh.append({field: getattr(record, field) for field in _LIFETIME_FIELDS})
        elif isinstance(placement, Conflict):
            aside.add(record, f"{record.runtime_id} ({record.source}#{record.sequence})", record.died_at_us, placement)
        placements[placement] += 1
        arrived.add(record.source, record.sequence, record.died_at_us)
    insert_rows(connection, lifetime_records, fresh)
    arrived.write(connection)
    return Appended(placements[Known.NEW], placements[Known.DUPLICATE], aside.write(connection))


def timeline_of(connection: Connection, tenant: str, request_id: str) -> TimelineAnswer | None:
    """From the record that stands."""
    columns = request_records.c
    query = select(request_records).where(
        columns.tenant == tenant, columns.request_id == request_id, columns.stands.is_(True)
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    stamps = _request_of(row).timeline or ()
    return TimelineAnswer(
        request_id=request_id,
        model=row["model"],
        version=row["version"],
        cold=any(stamp.stage in _COLD for stamp in stamps),
        stamps=stamps,
    )


def _tell(appended: Appended) -> None:
    if appended.conflicting:
        log.error("usage records contradict the ledger; they are kept aside", extra={"count": appended.conflicting})


def _check_size(records: Sequence[object]) -> None:
    if len(records) > MAX_BATCH:
        raise Refused(InvalidRequest("records", str(len(records)), f"must be at most {MAX_BATCH}"))


def _known_requests(
    connection: Connection, names: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[RequestRecord]]:
    known: dict[tuple[str, str], list[RequestRecord]] = {name: [] for name in names}
    name = tuple_(request_records.c.tenant, request_records.c.request_id)
    for some in chunks(sorted(names)):
        for row in connection.execute(select(request_records).where(name.in_(some))).mappings():
            known[row["tenant"], row["request_id"]].append(_request_of(row))
    return known


def _known_lifetimes(connection: Connection, names: Collection[str]) -> dict[str, LifetimeRecord]:
    known = {}
    for some in chunks(sorted(names)):
        query = select(lifetime_records).where(lifetime_records.c.runtime_id.in_(some))
        for row in connection.execute(query).mappings():
            known[row["runtime_id"]] = LifetimeRecord(**{field: row[field] for field in _LIFETIME_FIELDS})
    return known


def _request_of(row: RowMapping) -> RequestRecord:
    fields = {field: row[field] for field in _REQUEST_FIELDS}
    timeline = row["timeline"]
    fields["origin"] = Origin(fields["origin"])
    fields["timeline"] = None if timeline is None else msgspec.json.decode(timeline, type=tuple[Stamp, ...])
    return RequestRecord(**fields)


def _request_row(record: RequestRecord, known: Mapping[tuple[str, str], Sequence[RequestRecord]]) -> dict[str, Any]:
    return {
        **{field: getattr(record, field) for field in _REQUEST_FIELDS},
        "origin": record.origin.value,
        "orphan_of": _orphan_of(record),
        "timeline": None if record.timeline is None else encode(record.timeline).decode(),
        "stands": standing(known[record.tenant, record.request_id]) == record,
        "billable": is_billable(record),
    }


def _orphan_of(record: RequestRecord) -> str:
    return (record.runtime_id or "") if record.origin is Origin.ORPHAN else ""


def _set_standing(connection: Connection, group: Sequence[RequestRecord]) -> None:
    """Exactly one of the records of a request is charged."""
    chosen, columns = standing(group), request_records.c
    same = update(request_records).where(columns.tenant == chosen.tenant, columns.request_id == chosen.request_id)
    connection.execute(same.values(stands=False))
    it = same.where(columns.origin == chosen.origin.value, columns.orphan_of == _orphan_of(chosen))
    connection.execute(it.values(stands=True))
