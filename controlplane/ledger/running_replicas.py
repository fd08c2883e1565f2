"""Store reports of running replicas of pods, because a pod can be lost with all its records.

Each report replaces the one before. The lifetime record of the whole life replaces the last report. If none has come
for LOST_AFTER_S, the last report becomes the lifetime record. It may be up to RUNNING_REPORT_INTERVAL_S short, and
`reconcile` names it.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, LargeBinary, bindparam, cast, delete, select, update

from controlplane.clock import Clock, ClockStepDetector
from controlplane.db.dialects import upserts
from controlplane.db.ledger_schema import lifetime_records, open_lives
from controlplane.ledger.policy.record_precedence import RecordConflict, decide_lifetime_record
from controlplane.ledger.received_sequences import chunks
from controlplane.ledger.usage_batches import Unreadable
from kelvin.contracts.accounting.usage import KILLED, UNSEEN_END_PREFIX, LifetimeRecord
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.wire import BadJson, decoder, encode

log = logging.getLogger(__name__)

LOST_AFTER_S: Final = 3600.0  # a pod without a report for so long is gone; a month is closed no sooner after its end
CHECK_INTERVAL_S: Final = 60.0
_BATCH_ROWS: Final = 500  # lives that one transaction ends
_LIFETIME_DECODER: Final = decoder(LifetimeRecord)
_UPSERT_REPORT: Final = upserts(
    open_lives,
    lambda new: new.on_conflict_do_update(
        index_elements=["runtime_id"],
        set_={name: new.excluded[name] for name in ("told_at_us", "died_at_us", "record")},
    ),
)
_DELETE_REPORT: Final = delete(open_lives).where(open_lives.c.runtime_id == bindparam("ended"))
# SQLite stores any bytes, and one row that is no UTF-8 would fail the query of all rows.
_RAW_RECORD: Final[Mapping[str, ColumnElement[Any]]] = {
    "sqlite": cast(open_lives.c.record, LargeBinary),
    "postgresql": open_lives.c.record,
}


def store_reports(connection: Connection, records: Sequence[LifetimeRecord], now_us: int) -> None:
    """Store each report as the newest of its replica. Raises Refused(InvalidRequest) if one is invalid, and stores none
    then.

    Reports of a replica that has a lifetime record are ignored.
    """
    for record in records:
        _check(record)
    names = sorted({record.runtime_id for record in records})
    ended: set[str] = set()
    lived_us: dict[str, int] = {}
    for chunk in chunks(names):
        known = select(lifetime_records.c.runtime_id).where(lifetime_records.c.runtime_id.in_(chunk))
        ended |= set(connection.execute(known).scalars())
        c, raw = open_lives.c, _RAW_RECORD[connection.dialect.name]
        for runtime_id, tenant, report in connection.execute(
            select(c.runtime_id, c.tenant, raw).where(c.runtime_id.in_(chunk))
        ):
            if isinstance(last := _read(report, runtime_id, tenant), LifetimeRecord):
                lived_us[runtime_id] = last.total_us
    rows = [
        {
            "runtime_id": record.runtime_id,
            "tenant": record.tenant,
            "told_at_us": now_us,
            "died_at_us": record.died_at_us,
            "record": encode(record).decode(),
        }
        for record in sorted(records, key=lambda each: each.total_us)
        # Reports may overtake each other, and a pod's wall clock may step. The length of the life orders them.
        if record.runtime_id not in ended and record.total_us >= lived_us.get(record.runtime_id, 0)
    ]
    if rows:
        connection.execute(_UPSERT_REPORT[connection.dialect.name], rows)


def delete_reports(connection: Connection, ended: Collection[str]) -> None:
    """Delete the reports of replicas that have a lifetime record."""
    if ended:
        connection.execute(_DELETE_REPORT, [{"ended": name} for name in sorted(ended)])


def clamp_report_times(connection: Connection, now_us: int) -> None:
    """Move report times after `now_us` to `now_us`. They were stored while our clock was ahead, and may be years away,
    so that such a life would never end.
    """
    connection.execute(update(open_lives).where(open_lives.c.told_at_us > now_us).values(told_at_us=now_us))


def read_final_records(connection: Connection, before_us: int) -> tuple[list[LifetimeRecord], list[Unreadable]]:
    """Return lifetime records for replicas without a report since `before_us` (our clock), and the reports that can't
    be read. Changes nothing.
    """
    c = open_lives.c
    query = select(c.runtime_id, c.tenant, c.died_at_us, _RAW_RECORD[connection.dialect.name])
    query = query.where(c.told_at_us < before_us).order_by(c.told_at_us, c.runtime_id).limit(_BATCH_ROWS)
    records, unreadable = list[LifetimeRecord](), list[Unreadable]()
    for runtime_id, tenant, died_at_us, raw in connection.execute(query):
        match _read(raw, runtime_id, tenant):
            case LifetimeRecord() as report:
                source = f"{UNSEEN_END_PREFIX}{runtime_id}"[:128]
                records.append(msgspec.structs.replace(report, source=source, sequence=1, exit_status=KILLED))
            case str(fault):
                content = raw if isinstance(raw, bytes) else raw.encode()
                reason = f"its last report can't be read: {fault}"
                unreadable.append(
                    Unreadable(raw=content, reason=reason, subject=runtime_id, tenant=tenant, at_us=died_at_us)
                )
    return records, unreadable


def _read(raw: str | bytes, runtime_id: str, tenant: str) -> LifetimeRecord | str:
    """Return the reported life, or why it can't be read."""
    try:
        report = _LIFETIME_DECODER.decode(raw)
    except BadJson as error:
        return str(error)
    return report if (report.runtime_id, report.tenant) == (runtime_id, tenant) else "it is another replica's"


async def watch_lost_replicas(record_lost: Callable[[int], Awaitable[int]], clock: Clock, since_us: int) -> None:
    """Record the lives of replicas that have gone, by `record_lost(before_us)`, until cancelled.

    It first listens for LOST_AFTER_S from `since_us` (monotonic), because a replica that could not report has not gone.
    After a step of our own clock it listens for LOST_AFTER_S again.
    """
    steps = ClockStepDetector(clock)
    await clock.sleep(max(0.0, LOST_AFTER_S - (clock.monotonic_us() - since_us) / 1e6))
    while True:
        if by_us := steps.stepped_us():
            log.warning("the clock stepped; lost replicas are not recorded for an hour", extra={"by_us": by_us})
            await clock.sleep(LOST_AFTER_S)
            continue
        try:
            if count := await record_lost(clock.wall_s() * 1_000_000 - int(LOST_AFTER_S * 1e6)):
                log.warning("lost replicas are recorded by their last report", extra={"count": count})
        except Refused as refused:  # the database is locked or away
            log.warning("lost replicas can't be recorded yet", extra={"error": str(refused)})
        await clock.sleep(CHECK_INTERVAL_S)


def _check(record: LifetimeRecord) -> None:
    name = record.runtime_id[:128]
    if record.tenant is None:
        raise Refused(InvalidRequest("records", name, "must be of a replica that has a version"))
    as_ended = msgspec.structs.replace(record, sequence=1)
    if isinstance(wrong := decide_lifetime_record(None, as_ended, sequence_taken=False), RecordConflict):
        raise Refused(InvalidRequest("records", name, f"can't be: {wrong.reason}"))
