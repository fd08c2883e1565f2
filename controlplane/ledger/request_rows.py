"""Read and write request records as rows, and mark which are charged."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Final

from msgspec import UNSET
from sqlalchemy import Connection, RowMapping, select, update

from controlplane.db.chained_log import ChainWriter
from controlplane.db.hash_chain_policy import RowKind
from controlplane.db.ledger_schema import REQUEST_VALUES, digested_marks, request_records
from controlplane.ledger.closed_months import ClosedMonths
from controlplane.ledger.policy.booking import (
    LedgerRecord,
    decode_row_key,
    encode_row_key,
    mark_charged,
    mark_charged_by_key,
    row_key,
)
from controlplane.ledger.policy.rating import is_billable
from controlplane.ledger.received_sequences import chunks
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.timeline import Stamp
from kelvin.contracts.wire import decoder, encode

RequestKey = tuple[str, str]  # tenant and request id
RecordGroups = dict[RequestKey, list[LedgerRecord]]

_CONVERTED_FIELDS: Final = ("timeline", "once", "degraded")  # stored in another form
_FIELDS: Final = tuple(field for field in RequestRecord.__struct_fields__ if field not in _CONVERTED_FIELDS)
# The REQUEST_VALUES after a record's primary key and before its timeline.
_values: Final = attrgetter(*(column.name for column in REQUEST_VALUES[4:-1]))


def known_requests(connection: Connection, names: Collection[RequestKey]) -> RecordGroups:
    """Return all records of these requests. A request without records has an empty list."""
    known: RecordGroups = {name: [] for name in names}
    c = request_records.c
    for tenant, ids in _by_tenant(names).items():
        for chunk in chunks(sorted(ids)):
            query = select(request_records).where(c.tenant == tenant, c.request_id.in_(chunk))
            for row in connection.execute(query).mappings():
                known[tenant, row["request_id"]].append(decode_row(row))
    return known


def requests_with_same_key(connection: Connection, groups: RecordGroups) -> RecordGroups:
    """Return all records of other requests that share an idempotency key with these, directly or through others."""
    same_key_requests: RecordGroups = {}
    searched: set[RequestKey] = set()
    while fresh := _idempotency_keys((groups | same_key_requests).values()) - searched:
        searched |= fresh
        names: set[RequestKey] = set()
        c = request_records.c
        for tenant, onces in _by_tenant(fresh).items():
            for chunk in chunks(sorted(onces)):
                query = select(c.request_id).where(c.tenant == tenant, c.once.in_(chunk)).distinct()
                names |= {(tenant, request_id) for request_id in connection.execute(query).scalars()}
        same_key_requests |= known_requests(connection, names - groups.keys() - same_key_requests.keys())
    return same_key_requests


def mark_all_charged(groups: RecordGroups, closed_months: ClosedMonths) -> RecordGroups:
    """Mark the charged records. `groups` must have all requests that share an idempotency key with one of them."""
    booked: RecordGroups = {}
    keyed: defaultdict[str, dict[str, list[LedgerRecord]]] = defaultdict(dict)  # with idempotency keys, by tenant
    for (tenant, request_id), group in groups.items():
        if any(each.record.once for each in group):
            keyed[tenant][request_id] = group
        else:
            booked[tenant, request_id] = mark_charged(group, closed_months.closed_months(tenant))
    for tenant, tenant_groups in keyed.items():
        for request_id, group in mark_charged_by_key(tenant_groups, closed_months.closed_months(tenant)).items():
            booked[tenant, request_id] = group
    return booked


def decode_row(row: RowMapping) -> LedgerRecord:
    """Return the record of a row."""
    fields = {field: row[field] for field in _FIELDS}
    timeline, replaces, once, degraded = row["timeline"], row["replaces"], row["once"], row["degraded"]
    fields["origin"] = RecordOrigin(fields["origin"])
    fields["timeline"] = None if timeline is None else decoder(tuple[Stamp, ...]).decode(timeline)
    fields["once"] = UNSET if once is None else once
    fields["degraded"] = UNSET if degraded is None else degraded
    return LedgerRecord(
        RequestRecord(**fields), row["month"], row["stands"], None if replaces is None else decode_row_key(replaces)
    )


def request_row(booked: LedgerRecord, chains: ChainWriter) -> tuple[Any, ...]:
    """Return all columns of the record, linked into its chain."""
    record = booked.record
    timeline = None if record.timeline is None else encode(record.timeline).decode()
    values = (record.tenant, record.request_id, *row_key(record), *_values(record), timeline)
    once, degraded = record.once or None, record.degraded or None
    place = chains.add((record.tenant, booked.month), (RowKind.REQUEST, *values, *digested_marks(once, degraded)))
    return (*values, booked.stands, is_billable(record), booked.month, *place, _replaced_key(booked), once, degraded)


def update_charge(connection: Connection, booked: LedgerRecord) -> None:
    """Update whether a stored record is charged, and which record it replaces."""
    record, columns = booked.record, request_records.c
    origin, orphan_of = row_key(record)
    statement = update(request_records).where(
        columns.tenant == record.tenant,
        columns.request_id == record.request_id,
        columns.origin == origin,
        columns.orphan_of == orphan_of,
    )
    connection.execute(statement.values(stands=booked.stands, replaces=_replaced_key(booked)))


def _replaced_key(booked: LedgerRecord) -> str | None:
    return None if booked.replaces is None else encode_row_key(booked.replaces)


def _idempotency_keys(groups: Iterable[list[LedgerRecord]]) -> set[RequestKey]:
    return {(each.record.tenant, each.record.once) for group in groups for each in group if each.record.once}


def _by_tenant(names: Collection[RequestKey]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for tenant, name in names:
        found[tenant].append(name)
    return found
