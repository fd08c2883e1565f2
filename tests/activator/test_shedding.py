"""A full queue lets who is more urgent wait, and tells who makes way; who can't be in time is told while it waits."""

import asyncio
import gc
import weakref
from pathlib import Path

import aiohttp
import pytest

from activator import shedding
from activator.keys import VersionKey
from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask, Rank
from activator.policy.bounds import Bound
from activator.policy.expected import LEAST
from activator.policy.shed import Reason
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.errors import Refused
from contracts.traffic_errors import DeadlineTooShort, Displaced, Overloaded, OverShare
from tests.activator.control import STRANGER, VERSION, replica_row
from tests.activator.test_expected_waits import READY, Clock
from tests.activator.test_throttler import KEY, WIDE, Bell, _turns
from tests.activator.test_turns import until_queued
from tests.activator.world import CHAT, Got, World, world

OTHER = VersionKey("default", "other", VERSION)
TWO = Bound(2, 10_000, 10_000)


class Ground:
    """A throttler that stands at 100 s, and who asked it."""

    def __init__(self, limits: QueueLimits) -> None:
        self.clock = Clock()
        self.bell = Bell()
        self.throttler = Throttler(limits, self.bell, clock=self.clock, draw=lambda n: 0)

    async def ask(
        self, rank: Rank = Rank.INTERACTIVE, tenant: str = "t", key: VersionKey = KEY, in_s: float = 50.0
    ) -> "asyncio.Task[Replica]":
        """One that has a slot, waits, or was refused."""
        ask = Ask(tenant, 10, 10, rank)
        deadline = Deadline.after(in_s, self.clock.now_s)
        task = asyncio.create_task(self.throttler.acquire(key, ask, deadline))
        await _turns()
        self.throttler.check_integrity()
        return task

    async def paced(self) -> Replica:
        """One slot, which takes two seconds for ten tokens, and is taken."""
        self.throttler.apply(READY)
        ask = Ask("t", 10, 10)
        for _ in range(LEAST):
            replica = await self.throttler.acquire(KEY, ask, Deadline(1e6))
            self.clock.now_s += 2.0
            self.throttler.slots.release(KEY, replica, ask, None)
        return await self.throttler.acquire(KEY, ask, Deadline(1e6))

    async def leave(self, *tasks: "asyncio.Task[Replica]") -> None:
        """They give up; nothing is left."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self.throttler.check_integrity()
        assert self.throttler.loads.in_all.entries == 0


def _failure(task: "asyncio.Task[Replica]") -> object:
    error = task.exception()
    assert isinstance(error, Refused)
    return error.failure


async def test_who_is_lowest_makes_way() -> None:
    """Two may wait: batch goes for an interactive one, then a newcomer of batch is refused as it always was, and of
    two tenants the one that holds both places gives one up.
    """

    ground = Ground(QueueLimits(TWO, WIDE, WIDE, 60.0))
    batch, stays = await ground.ask(Rank.BATCH), await ground.ask()
    newest = await ground.ask()
    assert _failure(batch) == Displaced("batch", 1.0)
    assert isinstance(_failure(await ground.ask(Rank.BATCH)), Overloaded)
    other = await ground.ask(tenant="u")
    assert _failure(newest) == OverShare(1.0)
    counts = ground.throttler.shedding.counts
    assert counts == {
        (Reason.DISPLACED, Rank.BATCH): 1, (Reason.FULL, Rank.BATCH): 1, (Reason.OVER_SHARE, Rank.INTERACTIVE): 1,
    }  # fmt: skip
    await ground.leave(stays, other)


def test_what_was_refused_while_it_waited_is_gone_at_once() -> None:
    """No cycle keeps its frames, and with them all of its request, for a collection to find: under ten times the load
    there were a hundred thousand such objects, and the collection that found them held up everybody.
    """

    async def refused(ground: Ground) -> "weakref.ref[Refused]":
        try:
            await ground.throttler.acquire(KEY, Ask("t", 10, 10, Rank.BATCH), Deadline(150.0))
        except Refused as error:
            return weakref.ref(error)
        raise AssertionError

    async def scenario() -> None:
        ground = Ground(QueueLimits(Bound(1, 10_000, 10_000), WIDE, WIDE, 60.0))
        batch = asyncio.create_task(refused(ground))
        await _turns()
        stays = await ground.ask()
        assert (await batch)() is None
        await ground.leave(stays)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


async def test_who_makes_way_for_another_version_is_wanted_no_more() -> None:
    """Its version had nobody else: it isn't started for nobody."""

    ground = Ground(QueueLimits(WIDE, WIDE, Bound(1, 10_000, 10_000), 60.0))
    batch = await ground.ask(Rank.BATCH, key=OTHER)
    assert ground.bell.ringing == {OTHER}
    stays = await ground.ask()
    assert _failure(batch) == Displaced("batch", 1.0)
    assert ground.bell.ringing == {KEY}
    await ground.leave(stays)


async def test_who_was_given_a_slot_is_not_shed() -> None:
    """Not even in the moment before it knows."""

    ground = Ground(QueueLimits(Bound(1, 10_000, 10_000), WIDE, WIDE, 60.0))
    batch = asyncio.create_task(ground.throttler.acquire(KEY, Ask("t", 10, 10, Rank.BATCH), Deadline(150.0)))
    await asyncio.sleep(0)
    ground.throttler.apply(READY)
    assert not batch.done()
    waits, refused = await ground.ask(), await ground.ask()
    assert (await batch).row.runtime_id == "a"
    assert isinstance(_failure(refused), Overloaded)
    await ground.leave(waits)


async def test_one_that_just_gave_up_makes_way_and_is_not_counted() -> None:
    """Its task was cancelled, and stands in the queue for a moment."""

    ground = Ground(QueueLimits(Bound(1, 10_000, 10_000), WIDE, WIDE, 60.0))
    batch = await ground.ask(Rank.BATCH)
    batch.cancel()
    stays = asyncio.create_task(ground.throttler.acquire(KEY, Ask("t", 10, 10), Deadline(150.0)))
    await _turns()
    assert batch.cancelled()
    assert not stays.done()
    assert not ground.throttler.shedding.counts
    await ground.leave(stays)


async def test_who_can_not_be_in_time_makes_nobody_leave() -> None:
    """It is refused for that, before anybody makes way for it."""

    ground = Ground(QueueLimits(TWO, WIDE, WIDE, 60.0))
    await ground.paced()
    stay = [await ground.ask(Rank.BATCH), await ground.ask(in_s=2.5)]
    late = await ground.ask(in_s=3.0)
    assert _failure(late) == DeadlineTooShort(4.0, 3.0, False)
    await ground.leave(*stay)


async def test_a_retry_is_worth_its_while_when_the_queue_is_empty() -> None:
    """By the pace of the version: thirty tokens wait, ten of them take two seconds."""

    ground = Ground(QueueLimits(Bound(3, 10_000, 10_000), WIDE, WIDE, 60.0))
    await ground.paced()
    batch = await ground.ask(Rank.BATCH)
    stay = [await ground.ask() for _ in range(3)]
    assert _failure(batch) == Displaced("batch", 6.0)
    await ground.leave(*stay)


async def _overtaken(ground: Ground) -> list["asyncio.Task[Replica]"]:
    """The second of three had the time when it came; then one came that is before it. A slot has come free since."""
    holding = await ground.paced()
    first, second = await ground.ask(in_s=3.0), await ground.ask(in_s=6.5)
    third = await ground.ask(in_s=5.5)
    assert not second.done()
    ground.clock.now_s += 1.0
    ground.throttler.slots.release(KEY, holding, Ask("t", 10, 10), None)
    await _turns(2)
    assert first.done()
    assert not second.done()  # who has a slot goes first
    await _turns()
    return [second, third]


def test_who_was_overtaken_is_told_while_it_waits() -> None:
    """Not when its deadline passes; the control looks too rarely for that."""

    async def scenario(want: bool) -> None:
        ground = Ground(QueueLimits(WIDE, WIDE, WIDE, 60.0))
        second, third = await _overtaken(ground)
        assert second.done() is want
        if want:
            assert isinstance(failure := _failure(second), DeadlineTooShort)
            assert failure.expected_s > failure.remaining_s == 5.5
            assert ground.throttler.shedding.counts == {(Reason.LATE, Rank.INTERACTIVE): 1}
        await ground.leave(*(task for task in (second, third) if not task.done()))

    asyncio.run(scenario(want=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shedding, "SWEEP_S", 1e9)
        asyncio.run(scenario(want=False))


async def _told_by_rounds(ground: Ground) -> list[int]:
    """Each of thirty comes before those that were there, so that most have no time left; one of these gives up. How
    many were told after each round of the loop, once a slot came free.
    """
    holding = await ground.paced()
    tasks = [await ground.ask(in_s=20.0 - 0.1 * number) for number in range(30)]
    ground.throttler.slots.release(KEY, holding, Ask("t", 10, 10), None)
    await _turns(2)
    ground.throttler.check_integrity()
    late = 29 - ground.throttler.loads.in_all.entries - 1  # nobody who is told later stands there
    tasks[1].cancel()
    told = [ground.throttler.shedding.counts[Reason.LATE, Rank.INTERACTIVE]]
    while told[-1] < late and len(told) < late:
        await asyncio.sleep(0)
        told.append(ground.throttler.shedding.counts[Reason.LATE, Rank.INTERACTIVE])
    await _turns()
    assert sum(task.done() and not task.cancelled() and task.exception() is not None for task in tasks) == late
    await ground.leave(*(task for task in tasks if not task.done()))
    return told


def test_many_who_are_late_are_told_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands in the loop's way for a moment only: a slot that comes free meanwhile is given on. The control tells
    them all at once.
    """
    assert asyncio.run(_told_by_rounds(Ground(QueueLimits(WIDE, WIDE, WIDE, 60.0)))) == [8, 16, 18]
    monkeypatch.setattr(shedding, "TOLD", 1000)
    assert asyncio.run(_told_by_rounds(Ground(QueueLimits(WIDE, WIDE, WIDE, 60.0)))) == [19]


@pytest.mark.parametrize("another", [pytest.param(True, id="another waits"), pytest.param(False, id="nobody else")])
async def test_a_slot_goes_to_who_can_end_in_time(another: bool) -> None:
    """One whose answer takes two seconds has a bit more left after it waited for two: another one has the slot; alone
    it may try.
    """

    ground = Ground(QueueLimits(WIDE, WIDE, WIDE, 60.0))
    holding = await ground.paced()
    hasty = await ground.ask(in_s=3.9)
    patient = [await ground.ask()] if another else []
    ground.clock.now_s += 2.0
    ground.throttler.slots.release(KEY, holding, Ask("t", 10, 10), None)
    await _turns()
    if another:
        assert isinstance(_failure(hasty), DeadlineTooShort)
        assert patient[0].result() is holding
    else:
        assert hasty.result() is holding
    ground.throttler.check_integrity()


async def _shed(here: World) -> set[str]:
    """The lines of the page that say who was shed."""
    connector = aiohttp.UnixConnector(path=str(here.data / "run" / "activator.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as own,
        own.get("http://activator/metrics") as answer,
    ):
        return {line for line in (await answer.text()).splitlines() if line.startswith("kelvin_requests_shed_total")}


async def test_it_is_so_from_outside(tmp_path: Path) -> None:
    """A batch that waits is told by 503 and `Retry-After` when an interactive one comes; a tenant that holds the whole
    queue by 429 when another one comes. Each has its record, the metric says why.
    """

    async with world(tmp_path, queue_requests_in_all=2, queue_requests=2) as here:

        def send(**headers: str) -> asyncio.Task[Got]:
            return asyncio.create_task(here.post(body=CHAT, **headers))

        batch = send(x_kelvin_priority="batch")
        await until_queued(here, 1)
        first = send()
        await until_queued(here, 2)
        second = send()
        got = await batch
        assert (got.status, got.code, got.headers["retry-after"]) == (503, "displaced", "1")
        assert b"this batch request made way" in got.body
        got = await send(x_kelvin_priority="standard")
        assert (got.status, got.code) == (503, "overloaded")
        theirs = asyncio.create_task(here.post(body=CHAT | {"model": "theirs"}, key=STRANGER))
        got = await second
        assert (got.status, got.code, got.headers["retry-after"]) == (429, "over_share", "1")
        assert await _shed(here) == {
            'kelvin_requests_shed_total{process="activator",why="displaced",rank="batch"} 1',
            'kelvin_requests_shed_total{process="activator",why="full",rank="standard"} 1',
            'kelvin_requests_shed_total{process="activator",why="over_share",rank="interactive"} 1',
        }
        await here.replica("a")
        assert (await first).status == 200
        theirs.cancel()
        records = await here.control.until_records(4)
        assert [record.outcome for record in records[:4]] == ["displaced", "overloaded", "over_share", "ok"]


@pytest.mark.parametrize("away", ["draining", "resting"])
async def test_version_without_open_replicas_keeps_its_queue(away: str) -> None:
    """When no replica takes requests, the pace of the version says nothing about a wait: nobody is refused for it, a
    full queue still sheds, and no entry is left behind.
    """

    ground = Ground(QueueLimits(TWO, WIDE, WIDE, 60.0))
    holding = await ground.paced()
    stays, batch = await ground.ask(), await ground.ask(Rank.BATCH)
    if away == "draining":
        ground.throttler.apply(Feed(revision=1, replicas=(replica_row("a", 1, draining=True),)))
    else:
        ground.throttler.report_failed(holding)
    ground.clock.now_s += 1.0  # beyond the next sweep
    ground.throttler.slots.release(KEY, holding, Ask("t", 10, 10), 0)
    await _turns(4)
    assert not stays.done()
    newcomer = await ground.ask()
    assert _failure(batch) == Displaced("batch", 1.0)
    assert isinstance(_failure(await ground.ask(Rank.BATCH)), Overloaded)
    ground.throttler.apply(Feed(revision=1, replicas=(replica_row("b", 1),)))
    await _turns()
    assert stays.result().row.runtime_id == "b"
    await ground.leave(newcomer)


@pytest.mark.parametrize("step", ["shed", "wake", "breaker"])
async def test_error_while_entering_leaves_no_entry_in_the_queue(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails between an entry's joining the queue and its wait: the entry leaves with its request, and the
    slot that comes next is not given to it.
    """

    ground = Ground(QueueLimits(Bound(1, 10_000, 10_000), WIDE, WIDE, 60.0))
    if step == "shed":
        batch = await ground.ask(Rank.BATCH)
        monkeypatch.setattr(shedding, "wait_s", _fail)
    monkeypatch.setattr(ground.bell, "ensure", _fail)
    if step == "breaker":
        monkeypatch.setattr(ground.throttler.breakers, "enter", _fail)
    broken = await ground.ask()
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert ground.throttler.loads.in_all.entries == (1 if step == "shed" else 0)
    if step == "shed":
        await ground.leave(batch)


def _fail(*_: object) -> float:
    raise ZeroDivisionError
