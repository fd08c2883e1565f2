"""What replicas of pods say of their lives while they last: a pod can be gone with all that it had to tell.

Each word takes the place of the one before it, and the record of the whole life that of the last. Where none has come
for LOST_AFTER_S the last one becomes that record: it may be up to SO_FAR_S short, and `reconcile` names it.
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

LOST_AFTER_S: Final = 3600.0  # a pod that can't reach us for so long is gone; a month can't be closed sooner
LOOK_S: Final = 60.0
_BATCH_ROWS: Final = 500  # that end at once
_LIFETIME_DECODER: Final = decoder(LifetimeRecord)
_UPSERT_REPORT: Final = upserts(
    open_lives,
    lambda new: new.on_conflict_do_update(
        index_elements=["runtime_id"],
        set_={name: new.excluded[name] for name in ("told_at_us", "died_at_us", "record")},
    ),
)
_DELETE_REPORT: Final = delete(open_lives).where(open_lives.c.runtime_id == bindparam("ended"))
# SQLite keeps whatever bytes it was given, and one row that is no UTF-8 would fail the query of all.
_RAW_RECORD: Final[Mapping[str, ColumnElement[Any]]] = {
    "sqlite": cast(open_lives.c.record, LargeBinary),
    "postgresql": open_lives.c.record,
}


def note(connection: Connection, records: Sequence[LifetimeRecord], now_us: int) -> None:
    """Each as the newest word of its replica. Raises Refused(InvalidRequest) for one that can't be, and notes none.

    A replica whose life is recorded has nothing more to say.
    """
    for record in records:
        _check(record)
    names = sorted({record.runtime_id for record in records})
    ended: set[str] = set()
    lived_us: dict[str, int] = {}
    for some in chunks(names):
        known = select(lifetime_records.c.runtime_id).where(lifetime_records.c.runtime_id.in_(some))
        ended |= set(connection.execute(known).scalars())
        c, raw = open_lives.c, _RAW_RECORD[connection.dialect.name]
        for runtime_id, tenant, report in connection.execute(
            select(c.runtime_id, c.tenant, raw).where(c.runtime_id.in_(some))
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


def forget(connection: Connection, ended: Collection[str]) -> None:
    """Forget replicas whose lives are recorded."""
    if ended:
        connection.execute(_DELETE_REPORT, [{"ended": name} for name in sorted(ended)])


def clamp_report_times(connection: Connection, now_us: int) -> None:
    """Count reports that came while our clock was ahead as of `now_us`. Their own times may be years away, and such a
    life would never end.
    """
    connection.execute(update(open_lives).where(open_lives.c.told_at_us > now_us).values(told_at_us=now_us))


def read_final_records(connection: Connection, before_us: int) -> tuple[list[LifetimeRecord], list[Unreadable]]:
    """Return records for replicas that reported nothing since `before_us` (our clock), and the reports that can't be
    read. Changes nothing.
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
                reason = f"its last word can't be read: {fault}"
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

    Listen for LOST_AFTER_S from `since_us` (monotonic) first: a replica that could not report has not gone. After a
    step of our own clock, listen for LOST_AFTER_S again.
    """
    steps = ClockStepDetector(clock)
    await clock.sleep(max(0.0, LOST_AFTER_S - (clock.monotonic_us() - since_us) / 1e6))
    while True:
        if by_us := steps.stepped_us():
            log.warning("the clock stepped; lives are not ended for an hour", extra={"by_us": by_us})
            await clock.sleep(LOST_AFTER_S)
            continue
        try:
            if count := await record_lost(clock.wall_s() * 1_000_000 - int(LOST_AFTER_S * 1e6)):
                log.warning("lives end with the last word of their replicas", extra={"count": count})
        except Refused as refused:  # the database is another's for a moment
            log.warning("lives are not ended yet", extra={"error": str(refused)})
        await clock.sleep(LOOK_S)


def _check(record: LifetimeRecord) -> None:
    name = record.runtime_id[:128]
    if record.tenant is None:
        raise Refused(InvalidRequest("records", name, "must be of a replica that has a version"))
    as_ended = msgspec.structs.replace(record, sequence=1)
    if isinstance(wrong := decide_lifetime_record(None, as_ended, sequence_taken=False), RecordConflict):
        raise Refused(InvalidRequest("records", name, f"can't be: {wrong.reason}"))
