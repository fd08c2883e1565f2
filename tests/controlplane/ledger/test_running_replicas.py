"""The last report of a pod's replica is charged if its end was never recorded: once, and named in the audit."""

import asyncio

import msgspec
import pytest
from sqlalchemy import Connection, Engine, insert, select, text

from controlplane.db.ledger_schema import conflicts, lifetime_records
from controlplane.db.ledger_schema import open_lives as table
from controlplane.ledger import running_replicas
from controlplane.ledger.running_replicas import CHECK_INTERVAL_S, LOST_AFTER_S, read_final_records, watch_lost_replicas
from controlplane.ledger.usage_ledger import Ledger, append_lifetimes
from kelvin.contracts.accounting.usage import RUNNING_REPORT_INTERVAL_S, UNSEEN_END_PREFIX, LifetimeRecord
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import RunningLifetimes
from kelvin.contracts.wire import encode
from kelvin.process.loops import LoopHealth, Loops
from tests.controlplane.billing_fixture import enter, report, run_usage_audit, verify
from tests.controlplane.database_backends import DatabaseBackend
from tests.controlplane.usage_records import END_US, HOUR_US, lifetime_record, request_record
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually

NOW_US = END_US - HOUR_US


def so_far(idle_us: int, *, requests: int = 1, **figures: int) -> LifetimeRecord:
    """Return the report of a replica that has been idle for so long."""
    known = lifetime_record(1, idle_us=idle_us, requests=requests, died_at_us=NOW_US - HOUR_US + idle_us)
    return msgspec.structs.replace(known, sequence=0, **figures)


def note(engine: Engine, *records: LifetimeRecord, now_us: int = NOW_US) -> None:
    with engine.begin() as connection:
        running_replicas.store_reports(connection, records, now_us)


def cut(engine: Engine, before_us: int) -> list[LifetimeRecord]:
    """Record the end of replicas that have not reported since then."""
    with engine.begin() as connection:
        records, unreadable = read_final_records(connection, before_us)
        append_lifetimes(connection, records)
    assert unreadable == []
    return records


def open_ones(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(table.c.runtime_id)).scalars())


def charged_us(engine: Engine) -> tuple[int, int]:
    """Return the number of lifetimes and the idle time on the bill."""
    device = report(engine).device
    return sum(each.lifetimes for each in device), sum(each.idle_us for each in device)


def test_last_report_is_charged_for_a_lost_replica(engine: Engine) -> None:
    """It is charged once, as an ordinary record in an intact chain. Later reports change nothing."""
    for idle_us in (5_000_000, 9_000_000, 7_000_000):  # the last report arrives late
        note(engine, so_far(idle_us))
    assert charged_us(engine) == (0, 0), "a replica that may live was charged"
    assert cut(engine, NOW_US) == [], "it has just spoken"
    (ended,) = cut(engine, NOW_US + 1)
    assert (ended.source, ended.sequence, ended.exit_status) == (f"{UNSEEN_END_PREFIX}rt-1", 1, -9)
    assert charged_us(engine) == (1, 9_000_000)
    assert (open_ones(engine), cut(engine, NOW_US + 1)) == ([], [])
    note(engine, so_far(9_000_000))
    assert open_ones(engine) == [], "a recorded replica was opened again"
    assert verify(engine).sound


def test_reports_after_a_clock_step_back_are_kept(engine: Engine) -> None:
    """Later reports give an earlier end, and still count. The replica is billed up to its last report."""
    note(engine, so_far(600_000_000), now_us=NOW_US - HOUR_US)
    stepped = so_far(36_000_000_000)
    note(engine, msgspec.structs.replace(stepped, died_at_us=stepped.died_at_us - 12 * HOUR_US), now_us=NOW_US)
    assert cut(engine, NOW_US) == [], "it spoke a moment ago"
    (ended,) = cut(engine, NOW_US + 1)
    assert ended.idle_us == 36_000_000_000


class SteppingClock(VirtualClock):
    """A clock whose wall time can be set."""

    ahead_s = 0

    def wall_s(self) -> int:
        return super().wall_s() + self.ahead_s


async def test_own_clock_step_records_no_lost_replica() -> None:
    """After the step, a replica that reported a moment ago seems silent for two hours."""
    clock, reported_at_s, ended = SteppingClock(), list[int](), list[int]()

    async def cut(before_us: int) -> int:
        ended.extend(at_s for at_s in reported_at_s if at_s * 1_000_000 < before_us)
        return 0

    ending = asyncio.create_task(watch_lost_replicas(cut, clock, clock.monotonic_us()))
    await clock.advance(LOST_AFTER_S + 10 * CHECK_INTERVAL_S)
    reported_at_s.append(clock.wall_s())
    clock.ahead_s = 2 * int(LOST_AFTER_S)
    await clock.advance(LOST_AFTER_S - 2 * CHECK_INTERVAL_S)
    assert ended == []
    await clock.advance(4 * CHECK_INTERVAL_S)
    assert ended, "an hour later it is silent by every clock"
    ending.cancel()


async def test_report_from_the_future_still_expires(ledger: Ledger) -> None:
    """The pod ended before its clock was set right. An hour later its life is recorded, and not before."""
    await ledger.record_running_replicas(RunningLifetimes(records=(so_far(5_000_000),)), NOW_US + 365 * 24 * HOUR_US)
    cut_us = int(LOST_AFTER_S * 1e6)
    assert await ledger.record_lost_replicas(NOW_US - cut_us) == 0
    assert await ledger.record_lost_replicas(NOW_US) == 0
    assert await ledger.record_lost_replicas(NOW_US + 1) == 1


@pytest.mark.parametrize("taken", [True, False])
async def test_a_life_that_contradicts_the_ledger_ends_once(
    backend: DatabaseBackend, ledger: Ledger, caplog: pytest.LogCaptureFixture, taken: bool
) -> None:
    """Its record's sequence is used, so it is set aside, counted and named once. Control: otherwise it is recorded."""
    other = lifetime_record(2, source=f"{UNSEEN_END_PREFIX}rt-1", sequence=1)  # accepted by older control planes
    if taken:
        await ledger.database.write(lambda connection: append_lifetimes(connection, [other]))
    await ledger.record_running_replicas(RunningLifetimes(records=(so_far(5_000_000),)), NOW_US)
    assert [await ledger.record_lost_replicas(NOW_US + 1) for _ in range(2)] == [0 if taken else 1, 0]
    assert await ledger.database.read(lambda c: c.execute(select(table.c.runtime_id)).all()) == []
    kept = await ledger.database.read(lambda c: list(c.execute(select(conflicts.c.subject)).scalars()))
    assert kept == ["rt-1 (cut-rt-1#1)"] * taken
    assert [vars(each)["count"] for each in caplog.records] == [1] * taken


def _word(runtime: int) -> str:
    """Return a report as the table stores it."""
    known = lifetime_record(runtime, idle_us=5_000_000, died_at_us=NOW_US - HOUR_US)
    return encode(msgspec.structs.replace(known, sequence=0)).decode()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        pytest.param("", "Input data was truncated", id="empty"),
        pytest.param(_word(2)[:-9], "Input data was truncated", id="truncated"),
        pytest.param(_word(2).replace('"pid"', '"pids"'), "unknown field `pids`", id="an unknown field"),
        pytest.param(_word(3), "it is another replica's", id="another replica's record"),
        pytest.param(_word(2), None, id="control: a valid report"),
    ],
)
async def test_unreadable_report_blocks_no_other(
    backend: DatabaseBackend, ledger: Ledger, caplog: pytest.LogCaptureFixture, raw: str, why: str | None
) -> None:
    """It is named in the log and the audit, set aside unchanged, and removed. Other replicas are still recorded."""
    row = {"runtime_id": "rt-2", "tenant": "acme", "told_at_us": NOW_US - 1, "died_at_us": NOW_US, "record": raw}
    later = msgspec.structs.replace(so_far(5_000_000), runtime_id="rt-4")
    clock, database = VirtualClock(), ledger.database
    ending = asyncio.create_task(watch_lost_replicas(lambda _: ledger.record_lost_replicas(NOW_US + 1), clock, 0))

    async def ended() -> set[str]:
        """Wait until no life is open. Return the replicas with a recorded life."""
        while await database.read(lambda c: c.execute(select(table.c.runtime_id)).all()):
            assert not ending.done()
            await clock.advance(CHECK_INTERVAL_S)
        return set(await database.read(lambda c: c.execute(select(lifetime_records.c.runtime_id)).scalars().all()))

    await database.write(lambda connection: connection.execute(insert(table).values(row)))
    await ledger.record_running_replicas(RunningLifetimes(records=(so_far(5_000_000),)), NOW_US)
    assert await ended() == {"rt-1"} | ({"rt-2"} if why is None else set())
    await ledger.record_running_replicas(RunningLifetimes(records=(later,)), NOW_US)
    assert "rt-4" in await ended()
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    aside = await database.read(lambda c: c.execute(select(conflicts.c.subject, conflicts.c.record)).all())
    assert [tuple(each) for each in aside] == ([] if why is None else [("rt-2", raw)])
    assert verify(database.engine).sound
    named = [each for each in run_usage_audit(database.engine).differences if each.kind == "conflict"]
    assert [(each.subject, each.fails) for each in named] == ([] if why is None else [("rt-2", True)])
    assert why is None or why in named[0].detail
    logged = [vars(each)["subject"] for each in caplog.records if each.levelname == "ERROR"]
    assert logged == ([] if why is None else ["rt-2"])


async def test_report_that_is_not_utf8_blocks_no_other(ledger: Ledger) -> None:
    """A damaged disk may cause this in SQLite. Two reports with the same damage are both named."""

    def spoil(connection: Connection) -> None:
        for name in ("rt-2", "rt-3"):
            row = "INSERT INTO ledger_open_lives VALUES (:name, 'acme', 1, 1, CAST(x'7bff' AS TEXT))"
            connection.execute(text(row), {"name": name})

    await ledger.record_running_replicas(RunningLifetimes(records=(so_far(5_000_000),)), NOW_US)
    await ledger.database.write(spoil)
    assert [await ledger.record_lost_replicas(NOW_US + 1) for _ in range(2)] == [1, 0]
    kept = await ledger.database.read(lambda c: c.execute(select(conflicts.c.subject)).scalars().all())
    assert sorted(kept) == ["rt-2", "rt-3"]


def test_lifetime_record_replaces_reports(engine: Engine) -> None:
    """This holds even if a report arrives after it."""
    note(engine, so_far(5_000_000))
    enter(engine, [request_record(1), lifetime_record(1, idle_us=9_000_000)])
    note(engine, so_far(8_000_000))
    assert (open_ones(engine), cut(engine, NOW_US + 1)) == ([], [])
    assert charged_us(engine) == (1, 9_000_000)
    assert run_usage_audit(engine).differences == ()


@pytest.mark.parametrize("has_reported", [True, False])
def test_lost_replica_is_reported(engine: Engine, has_reported: bool) -> None:
    """It is listed with its largest possible cost, and does not fail the audit. Later requests raise no alarm.

    Negative control: without a report the lifetime is missing, and the audit fails.
    """
    served = [request_record(number, device_us=1_500_000) for number in (1, 2, 3)]
    enter(engine, served)
    if has_reported:
        note(engine, so_far(5_000_000, requests=1))
    for charged in (False, True):
        if charged:
            cut(engine, NOW_US + 1)
        (difference,) = run_usage_audit(engine).differences
        kind = "charged_so_far" if has_reported else "lifetime_missing"
        assert (difference.kind, difference.subject, difference.fails) == (kind, "rt-1", not has_reported)
        assert difference.device_us == (RUNNING_REPORT_INTERVAL_S * 1_000_000 if has_reported else None)
        assert report(engine, live=set()).balance.balanced is has_reported


def test_reporting_replica_is_open(engine: Engine) -> None:
    """It is neither missing nor charged, even if the control plane does not know the replica."""
    enter(engine, [request_record(1)])
    note(engine, so_far(5_000_000), now_us=END_US)
    assert run_usage_audit(engine).differences == ()
    month = report(engine, live=set(), now_us=END_US)
    assert (month.open_runtimes, month.balance.balanced) == (("rt-1",), True)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        pytest.param(lifetime_record(1, tenant=None), "must be of a replica that has a version", id="without a tenant"),
        pytest.param(so_far(1, active_us=-1), "can't be: active_us is -1", id="a negative time"),
    ],
)
def test_impossible_report_is_refused(engine: Engine, wrong: LifetimeRecord, rule: str) -> None:
    """The error names the rule, and nothing of the batch is stored."""
    with pytest.raises(Refused, match=rule):
        note(engine, so_far(1, total_us=9), wrong)
    assert open_ones(engine) == []


async def test_no_replica_is_lost_right_after_a_start() -> None:
    """A started control plane waits as long as for any silent replica. A database error does not restart the wait."""
    clock, asked, error = VirtualClock(), list[int](), list[Exception]()

    async def record_lost_replicas(before_us: int) -> int:
        if error:
            raise error.pop()
        asked.append(clock.wall_s() * 1_000_000 - before_us)
        return 0

    since_us = clock.monotonic_us()
    async with Loops(LoopHealth()) as loops:
        loops.start("lives", lambda: watch_lost_replicas(record_lost_replicas, clock, since_us))
        await clock.advance(LOST_AFTER_S - 1)
        assert asked == []
        await clock.advance(1 + 2 * CHECK_INTERVAL_S)
        assert asked == [int(LOST_AFTER_S * 1e6)] * 3
        error.append(OSError("disk I/O error"))
        await clock.advance(CHECK_INTERVAL_S)  # this one fails
        await eventually(lambda: len(asked) == 4, "it is begun again")
        await clock.advance(CHECK_INTERVAL_S)
        assert len(asked) == 5
