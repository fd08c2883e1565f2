"""Request records as rows: found by their names, read, written, and marked as charged or not."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Final

from msgspec import UNSET
from sqlalchemy import Connection, RowMapping, select, update

from contracts.timeline import Stamp
from contracts.usage import Origin, RequestRecord
from contracts.wire import decoder, encode
from controlplane.arrivals import chunks
from controlplane.chains import Chains
from controlplane.closings import Closed
from controlplane.ledger_schema import REQUEST_VALUES, marks_of, request_records
from controlplane.policy.booking import Booked, book, book_together, key_of, packed, unpacked
from controlplane.policy.chain import Kind
from controlplane.policy.rating import is_billable

Name = tuple[str, str]  # tenant and request id
Groups = dict[Name, list[Booked]]

_MADE: Final = ("timeline", "once", "degraded")  # of what a column has in another form
_FIELDS: Final = tuple(field for field in RequestRecord.__struct_fields__ if field not in _MADE)
# Of REQUEST_VALUES, what comes after the name of a record and before its timeline.
_values: Final = attrgetter(*(column.name for column in REQUEST_VALUES[4:-1]))


def known_requests(connection: Connection, names: Collection[Name]) -> Groups:
    """All records of these requests; an empty list where there is none."""
    known: Groups = {name: [] for name in names}
    c = request_records.c
    for tenant, ids in _by_tenant(names).items():
        for some in chunks(sorted(ids)):
            query = select(request_records).where(c.tenant == tenant, c.request_id.in_(some))
            for row in connection.execute(query).mappings():
                known[tenant, row["request_id"]].append(booked_of(row))
    return known


def kin_of(connection: Connection, groups: Groups) -> Groups:
    """All records of other requests that have a `once` in common with these, or with one of those."""
    kin: Groups = {}
    asked: set[Name] = set()
    while fresh := _onces((groups | kin).values()) - asked:
        asked |= fresh
        names: set[Name] = set()
        c = request_records.c
        for tenant, onces in _by_tenant(fresh).items():
            for some in chunks(sorted(onces)):
                query = select(c.request_id).where(c.tenant == tenant, c.once.in_(some)).distinct()
                names |= {(tenant, request_id) for request_id in connection.execute(query).scalars()}
        kin |= known_requests(connection, names - groups.keys() - kin.keys())
    return kin


def book_all(groups: Groups, shut: Closed) -> Groups:
    """Mark what is charged. `groups` are whole: of each that has a `once`, its kin are there."""
    booked: Groups = {}
    together: defaultdict[str, dict[str, list[Booked]]] = defaultdict(dict)
    for (tenant, request_id), group in groups.items():
        if any(each.record.once for each in group):
            together[tenant][request_id] = group
        else:
            booked[tenant, request_id] = book(group, shut.of(tenant))
    for tenant, each in together.items():
        for request_id, group in book_together(each, shut.of(tenant)).items():
            booked[tenant, request_id] = group
    return booked


def booked_of(row: RowMapping) -> Booked:
    """A row of requests, whole."""
    fields = {field: row[field] for field in _FIELDS}
    timeline, replaces, once, degraded = row["timeline"], row["replaces"], row["once"], row["degraded"]
    fields["origin"] = Origin(fields["origin"])
    fields["timeline"] = None if timeline is None else decoder(tuple[Stamp, ...]).decode(timeline)
    fields["once"] = UNSET if once is None else once
    fields["degraded"] = UNSET if degraded is None else degraded
    return Booked(
        RequestRecord(**fields), row["month"], row["stands"], None if replaces is None else unpacked(replaces)
    )


def request_row(booked: Booked, chains: Chains) -> tuple[Any, ...]:
    """Every column of it, linked into its chain."""
    record = booked.record
    timeline = None if record.timeline is None else encode(record.timeline).decode()
    values = (record.tenant, record.request_id, *key_of(record), *_values(record), timeline)
    once, degraded = record.once or None, record.degraded or None
    place = chains.add((record.tenant, booked.month), (Kind.REQUEST, *values, *marks_of(once, degraded)))
    return (*values, booked.stands, is_billable(record), booked.month, *place, _replaced(booked), once, degraded)


def set_standing(connection: Connection, booked: Booked) -> None:
    """Whether a record that is there is charged, and what it replaces."""
    record, columns = booked.record, request_records.c
    origin, orphan_of = key_of(record)
    it = update(request_records).where(
        columns.tenant == record.tenant,
        columns.request_id == record.request_id,
        columns.origin == origin,
        columns.orphan_of == orphan_of,
    )
    connection.execute(it.values(stands=booked.stands, replaces=_replaced(booked)))


def _replaced(booked: Booked) -> str | None:
    return None if booked.replaces is None else packed(booked.replaces)


def _onces(groups: Iterable[list[Booked]]) -> set[Name]:
    return {(each.record.tenant, each.record.once) for group in groups for each in group if each.record.once}


def _by_tenant(names: Collection[Name]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for tenant, name in names:
        found[tenant].append(name)
    return found
