"""What a replica in a pod says of its life counts where nobody can say how it ended: once, and named."""

import asyncio

import msgspec
import pytest
from sqlalchemy import Connection, Engine, insert, select, text

from contracts.control import LivesSoFar
from contracts.errors import Refused
from contracts.usage import CUT, SO_FAR_S, LifetimeRecord
from contracts.wire import encode
from controlplane import open_lives
from controlplane.ledger import Ledger, append_lifetimes
from controlplane.ledger_schema import conflicts, lifetime_records
from controlplane.ledger_schema import open_lives as table
from controlplane.open_lives import CUT_S, LOOK_S, cut_forever, cut_off
from service.loops import LoopHealth, Loops
from tests.controlplane.backends import Backend
from tests.controlplane.billing_ground import enter, reconciled, report, verify
from tests.controlplane.usage_records import END_US, HOUR_US, lifetime_record, request_record
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually

NOW_US = END_US - HOUR_US


def so_far(idle_us: int, *, requests: int = 1, **figures: int) -> LifetimeRecord:
    """The word of a replica that was idle for so long."""
    known = lifetime_record(1, idle_us=idle_us, requests=requests, died_at_us=NOW_US - HOUR_US + idle_us)
    return msgspec.structs.replace(known, sequence=0, **figures)


def note(engine: Engine, *records: LifetimeRecord, now_us: int = NOW_US) -> None:
    with engine.begin() as connection:
        open_lives.note(connection, records, now_us)


def cut(engine: Engine, before_us: int) -> list[LifetimeRecord]:
    """End those that have said nothing since then."""
    with engine.begin() as connection:
        records, unreadable = cut_off(connection, before_us)
        append_lifetimes(connection, records)
    assert unreadable == []
    return records


def open_ones(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(table.c.runtime_id)).scalars())


def charged_us(engine: Engine) -> tuple[int, int]:
    """Lives and idle time on the bill."""
    device = report(engine).device
    return sum(each.lifetimes for each in device), sum(each.idle_us for each in device)


def test_the_last_word_counts_where_no_end_is_told(engine: Engine) -> None:
    """Once, as a record like others: the bill has it, the chain is whole, and words of before change nothing."""
    for idle_us in (5_000_000, 9_000_000, 7_000_000):  # the last one was overtaken
        note(engine, so_far(idle_us))
    assert charged_us(engine) == (0, 0), "while it may live, nothing is charged"
    assert cut(engine, NOW_US) == [], "it has just spoken"
    (ended,) = cut(engine, NOW_US + 1)
    assert (ended.source, ended.sequence, ended.exit_status) == (f"{CUT}rt-1", 1, -9)
    assert charged_us(engine) == (1, 9_000_000)
    assert (open_ones(engine), cut(engine, NOW_US + 1)) == ([], [])
    note(engine, so_far(9_000_000))
    assert open_ones(engine) == [], "who is recorded has nothing more to say"
    assert verify(engine).sound


def test_a_pod_whose_clock_steps_back_is_still_heard(engine: Engine) -> None:
    """Its later words say an earlier end. They count: it lives, and is billed to its last word."""
    note(engine, so_far(600_000_000), now_us=NOW_US - HOUR_US)
    stepped = so_far(36_000_000_000)
    note(engine, msgspec.structs.replace(stepped, died_at_us=stepped.died_at_us - 12 * HOUR_US), now_us=NOW_US)
    assert cut(engine, NOW_US) == [], "it spoke a moment ago"
    (ended,) = cut(engine, NOW_US + 1)
    assert ended.idle_us == 36_000_000_000


class SteppingClock(VirtualClock):
    """Its wall clock can be set."""

    ahead_s = 0

    def wall_s(self) -> int:
        return super().wall_s() + self.ahead_s


async def test_no_life_ends_for_a_step_of_our_own_clock() -> None:
    """Who spoke a moment before has been silent for two hours by then."""
    clock, told_at_s, ended = SteppingClock(), list[int](), list[int]()

    async def cut(before_us: int) -> int:
        ended.extend(at_s for at_s in told_at_s if at_s * 1_000_000 < before_us)
        return 0

    ending = asyncio.create_task(cut_forever(cut, clock, clock.monotonic_us()))
    await clock.advance(CUT_S + 10 * LOOK_S)
    told_at_s.append(clock.wall_s())
    clock.ahead_s = 2 * int(CUT_S)
    await clock.advance(CUT_S - 2 * LOOK_S)
    assert ended == []
    await clock.advance(4 * LOOK_S)
    assert ended, "an hour later it is silent by every clock"
    ending.cancel()


async def test_a_word_that_came_while_our_clock_was_ahead_grows_old(ledger: Ledger) -> None:
    """Its pod ended before the clock was set right: an hour after that the life is recorded, and not before."""
    await ledger.note_lives(LivesSoFar(records=(so_far(5_000_000),)), NOW_US + 365 * 24 * HOUR_US)
    cut_us = int(CUT_S * 1e6)
    assert await ledger.cut_lives(NOW_US - cut_us) == 0
    assert await ledger.cut_lives(NOW_US) == 0
    assert await ledger.cut_lives(NOW_US + 1) == 1


@pytest.mark.parametrize("taken", [True, False])
async def test_a_life_that_contradicts_the_ledger_ends_once(
    backend: Backend, ledger: Ledger, caplog: pytest.LogCaptureFixture, taken: bool
) -> None:
    """Kept aside, counted and named, and not tried for ever: here its record's place is another's. The control: where
    it isn't, the life is recorded.
    """
    other = lifetime_record(2, source=f"{CUT}rt-1", sequence=1)  # as only an older control plane let in
    if taken:
        await ledger.database.write(lambda connection: append_lifetimes(connection, [other]))
    await ledger.note_lives(LivesSoFar(records=(so_far(5_000_000),)), NOW_US)
    assert [await ledger.cut_lives(NOW_US + 1) for _ in range(2)] == [0 if taken else 1, 0]
    assert await ledger.database.read(lambda c: c.execute(select(table.c.runtime_id)).all()) == []
    kept = await ledger.database.read(lambda c: list(c.execute(select(conflicts.c.subject)).scalars()))
    assert kept == ["rt-1 (cut-rt-1#1)"] * taken
    assert [vars(each)["count"] for each in caplog.records] == [1] * taken


def _word(runtime: int) -> str:
    """As it lies there."""
    known = lifetime_record(runtime, idle_us=5_000_000, died_at_us=NOW_US - HOUR_US)
    return encode(msgspec.structs.replace(known, sequence=0)).decode()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        pytest.param("", "Input data was truncated", id="nothing"),
        pytest.param(_word(2)[:-9], "Input data was truncated", id="cut"),
        pytest.param(_word(2).replace('"pid"', '"pids"'), "unknown field `pids`", id="of another program"),
        pytest.param(_word(3), "it is another replica's", id="another's"),
        pytest.param(_word(2), None, id="the control: a good one"),
    ],
)
async def test_one_that_can_t_be_read_holds_up_no_other(
    backend: Backend, ledger: Ledger, caplog: pytest.LogCaptureFixture, raw: str, why: str | None
) -> None:
    """It is named, in the log and in the accounts, kept aside as it is, and gone; lives that come later end, too."""
    row = {"runtime_id": "rt-2", "tenant": "acme", "told_at_us": NOW_US - 1, "died_at_us": NOW_US, "record": raw}
    later = msgspec.structs.replace(so_far(5_000_000), runtime_id="rt-4")
    clock, database = VirtualClock(), ledger.database
    ending = asyncio.create_task(cut_forever(lambda _: ledger.cut_lives(NOW_US + 1), clock, 0))

    async def ended() -> set[str]:
        """Whose life is recorded, once nobody's is open."""
        while await database.read(lambda c: c.execute(select(table.c.runtime_id)).all()):
            assert not ending.done()
            await clock.advance(LOOK_S)
        return set(await database.read(lambda c: c.execute(select(lifetime_records.c.runtime_id)).scalars().all()))

    await database.write(lambda connection: connection.execute(insert(table).values(row)))
    await ledger.note_lives(LivesSoFar(records=(so_far(5_000_000),)), NOW_US)
    assert await ended() == {"rt-1"} | ({"rt-2"} if why is None else set())
    await ledger.note_lives(LivesSoFar(records=(later,)), NOW_US)
    assert "rt-4" in await ended()
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    aside = await database.read(lambda c: c.execute(select(conflicts.c.subject, conflicts.c.record)).all())
    assert [tuple(each) for each in aside] == ([] if why is None else [("rt-2", raw)])
    assert verify(database.engine).sound
    named = [each for each in reconciled(database.engine).differences if each.kind == "conflict"]
    assert [(each.subject, each.fails) for each in named] == ([] if why is None else [("rt-2", True)])
    assert why is None or why in named[0].detail
    told = [vars(each)["subject"] for each in caplog.records if each.levelname == "ERROR"]
    assert told == ([] if why is None else ["rt-2"])


async def test_bytes_that_are_no_text_hold_up_no_other(ledger: Ledger) -> None:
    """SQLite gives back what a disk made of them. Of two that are the same each is named."""

    def spoil(connection: Connection) -> None:
        for name in ("rt-2", "rt-3"):
            row = "INSERT INTO ledger_open_lives VALUES (:name, 'acme', 1, 1, CAST(x'7bff' AS TEXT))"
            connection.execute(text(row), {"name": name})

    await ledger.note_lives(LivesSoFar(records=(so_far(5_000_000),)), NOW_US)
    await ledger.database.write(spoil)
    assert [await ledger.cut_lives(NOW_US + 1) for _ in range(2)] == [1, 0]
    kept = await ledger.database.read(lambda c: c.execute(select(conflicts.c.subject)).scalars().all())
    assert sorted(kept) == ["rt-2", "rt-3"]


def test_the_end_takes_the_place_of_all_that_was_said(engine: Engine) -> None:
    """Also where the last word comes behind it."""
    note(engine, so_far(5_000_000))
    enter(engine, [request_record(1), lifetime_record(1, idle_us=9_000_000)])
    note(engine, so_far(8_000_000))
    assert (open_ones(engine), cut(engine, NOW_US + 1)) == ([], [])
    assert charged_us(engine) == (1, 9_000_000)
    assert reconciled(engine).differences == ()


@pytest.mark.parametrize("told", [True, False])
def test_a_pod_that_is_gone_is_named(engine: Engine, told: bool) -> None:
    """Known, at most so long, and no failure, before it is charged and after; what it served later raises no alarm.

    The control: of a replica that said nothing the life is missing, and no account agrees.
    """
    served = [request_record(number, device_us=1_500_000) for number in (1, 2, 3)]
    enter(engine, served)
    if told:
        note(engine, so_far(5_000_000, requests=1))
    for charged in (False, True):
        if charged:
            cut(engine, NOW_US + 1)
        (difference,) = reconciled(engine).differences
        kind = "charged_so_far" if told else "lifetime_missing"
        assert (difference.kind, difference.subject, difference.fails) == (kind, "rt-1", not told)
        assert difference.device_us == (SO_FAR_S * 1_000_000 if told else None)
        assert report(engine, live=set()).balance.balanced is told


def test_a_pod_that_speaks_is_open(engine: Engine) -> None:
    """Neither gone nor charged, though the control plane knows no replica of that name."""
    enter(engine, [request_record(1)])
    note(engine, so_far(5_000_000), now_us=END_US)
    assert reconciled(engine).differences == ()
    month = report(engine, live=set(), now_us=END_US)
    assert (month.open_runtimes, month.balance.balanced) == (("rt-1",), True)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        pytest.param(lifetime_record(1, tenant=None), "must be of a replica that has a version", id="nobody's"),
        pytest.param(so_far(1, active_us=-1), "can't be: active_us is -1", id="less than nothing"),
    ],
)
def test_what_can_t_be_is_refused(engine: Engine, wrong: LifetimeRecord, rule: str) -> None:
    """By name, and nothing of its batch is noted."""
    with pytest.raises(Refused, match=rule):
        note(engine, so_far(1, total_us=9), wrong)
    assert open_ones(engine) == []


async def test_nobody_is_ended_who_could_not_be_heard() -> None:
    """After a start of the control plane as long as any other; then whoever has said nothing for that long.

    An error of the database does not make the hour begin anew.
    """
    clock, asked, error = VirtualClock(), list[int](), list[Exception]()

    async def cut_lives(before_us: int) -> int:
        if error:
            raise error.pop()
        asked.append(clock.wall_s() * 1_000_000 - before_us)
        return 0

    since_us = clock.monotonic_us()
    async with Loops(LoopHealth()) as loops:
        loops.start("lives", lambda: cut_forever(cut_lives, clock, since_us))
        await clock.advance(CUT_S - 1)
        assert asked == []
        await clock.advance(1 + 2 * LOOK_S)
        assert asked == [int(CUT_S * 1e6)] * 3
        error.append(OSError("disk I/O error"))
        await clock.advance(LOOK_S)  # this one fails
        await eventually(lambda: len(asked) == 4, "it is begun again")
        await clock.advance(LOOK_S)
        assert len(asked) == 5
