"""A full queue lets who is more urgent wait, and tells who makes way; who can't be in time is told while it waits."""

import asyncio
import gc
import weakref
from pathlib import Path

import pytest

from activator.queue import load_shedding
from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_decision import Reason
from activator.queue.version_queue import Replica
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import DeadlineTooShort, Overloaded, ShedByFairShare, ShedByPriority
from tests.activator.clock import Clock
from tests.activator.control import STRANGER, VERSION, replica_row
from tests.activator.queue.slot_world import KEY, SlotWorld, failure_of, queue_limits, run_loop
from tests.activator.world import CHAT, ReceivedResponse, world

OTHER = VersionKey("default", "other", VERSION)
ASK, BATCH = QueuedRequest("t", 10, 10), QueuedRequest("t", 10, 10, PriorityClass.BATCH)


class Ground(SlotWorld):
    """A throttler that stands at 100 s."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.now = Clock(100.0)
        super().__init__(limits=limits, clock=self.now)

    async def paced(self) -> Replica:
        """One slot, which takes two seconds for ten tokens, and is taken."""
        self.feed(replica_row("a", 1))
        await self.measure(self.now, ASK)
        return await self.take(ASK)


async def test_full_queue_sheds_the_lowest_request() -> None:
    """Two may wait: batch goes for an interactive one, then a newcomer of batch is refused as it always was, and of
    two tenants the one that holds both places gives one up.
    """

    ground = Ground(queue_limits(version=2))
    batch, stays = await ground.ask(BATCH), await ground.ask(ASK)
    newest = await ground.ask(ASK)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert isinstance(failure_of(await ground.ask(BATCH)), Overloaded)
    other = await ground.ask(QueuedRequest("u", 10, 10))
    assert failure_of(newest) == ShedByFairShare(1.0)
    counts = ground.throttler.shedding.counts
    assert counts == {
        (Reason.DISPLACED, PriorityClass.BATCH): 1, (Reason.FULL, PriorityClass.BATCH): 1, (Reason.OVER_SHARE,
        PriorityClass.INTERACTIVE): 1,
    }  # fmt: skip
    await ground.leave(stays, other)


def test_what_was_refused_while_it_waited_is_gone_at_once() -> None:
    """No cycle keeps its frames, and with them all of its request, for a collection to find: under ten times the load
    there were a hundred thousand such objects, and the collection that found them held up everybody.
    """

    async def refused(ground: Ground) -> "weakref.ref[Refused]":
        try:
            await ground.take(BATCH)
        except Refused as error:
            return weakref.ref(error)
        raise AssertionError

    async def scenario() -> None:
        ground = Ground(queue_limits(version=1))
        batch = asyncio.create_task(refused(ground))
        await run_loop()
        stays = await ground.ask(ASK)
        assert (await batch)() is None
        await ground.leave(stays)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


async def test_who_makes_way_for_another_version_is_wanted_no_more() -> None:
    """Its version had nobody else: it isn't started for nobody."""

    ground = Ground(queue_limits(in_all=1))
    batch = await ground.ask(BATCH, key=OTHER)
    assert ground.bell.ringing == {OTHER}
    stays = await ground.ask(ASK)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert ground.bell.ringing == {KEY}
    await ground.leave(stays)


async def test_request_with_a_slot_is_not_shed() -> None:
    """Not even in the moment before it knows."""

    ground = Ground(queue_limits(version=1))
    batch = asyncio.create_task(ground.take(BATCH))
    await asyncio.sleep(0)
    ground.feed(replica_row("a", 1))
    assert not batch.done()
    waits, refused = await ground.ask(ASK), await ground.ask(ASK)
    assert (await batch).row.runtime_id == "a"
    assert isinstance(failure_of(refused), Overloaded)
    await ground.leave(waits)


async def test_one_that_just_gave_up_makes_way_and_is_not_counted() -> None:
    """Its task was cancelled, and stands in the queue for a moment."""

    ground = Ground(queue_limits(version=1))
    batch = await ground.ask(BATCH)
    batch.cancel()
    stays = asyncio.create_task(ground.take(ASK))
    await run_loop()
    assert batch.cancelled()
    assert not stays.done()
    assert not ground.throttler.shedding.counts
    await ground.leave(stays)


async def test_request_that_is_too_late_displaces_nobody() -> None:
    """It is refused for that, before anybody makes way for it."""

    ground = Ground(queue_limits(version=2))
    await ground.paced()
    stay = [await ground.ask(BATCH), await ground.ask(ASK, in_s=2.5)]
    late = await ground.ask(ASK, in_s=3.0)
    assert failure_of(late) == DeadlineTooShort(4.0, 3.0, False)
    await ground.leave(*stay)


async def test_a_retry_is_worth_its_while_when_the_queue_is_empty() -> None:
    """By the pace of the version: thirty tokens wait, ten of them take two seconds."""

    ground = Ground(queue_limits(version=3))
    await ground.paced()
    batch = await ground.ask(BATCH)
    stay = [await ground.ask(ASK) for _ in range(3)]
    assert failure_of(batch) == ShedByPriority("batch", 6.0)
    await ground.leave(*stay)


async def _overtaken(ground: Ground) -> list["asyncio.Task[Replica]"]:
    """The second of three had the time when it came; then one came that is before it. A slot has come free since."""
    holding = await ground.paced()
    first, second = await ground.ask(ASK, in_s=3.0), await ground.ask(ASK, in_s=6.5)
    third = await ground.ask(ASK, in_s=5.5)
    assert not second.done()
    ground.now.now_s += 1.0
    ground.release(holding, ASK)
    await run_loop(2)
    assert first.done()
    assert not second.done()  # who has a slot goes first
    await run_loop()
    return [second, third]


@pytest.mark.parametrize("sweeps", [pytest.param(True, id="as it is"), pytest.param(False, id="rarely: the control")])
async def test_overtaken_request_is_shed_before_its_deadline(sweeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its deadline passes; the control looks too rarely for that."""
    if not sweeps:
        monkeypatch.setattr(load_shedding, "SWEEP_S", 1e9)
    ground = Ground()
    second, third = await _overtaken(ground)
    assert second.done() is sweeps
    if sweeps:
        assert isinstance(failure := failure_of(second), DeadlineTooShort)
        assert failure.expected_s > failure.remaining_s == 5.5
        assert ground.throttler.shedding.counts == {(Reason.LATE, PriorityClass.INTERACTIVE): 1}
    await ground.leave(*(task for task in (second, third) if not task.done()))


async def _told_by_rounds(ground: Ground) -> list[int]:
    """Each of thirty comes before those that were there, so that most have no time left; one of these gives up. How
    many were told after each round of the loop, once a slot came free.
    """
    holding = await ground.paced()
    tasks = [await ground.ask(ASK, in_s=20.0 - 0.1 * number) for number in range(30)]
    ground.release(holding, ASK)
    await run_loop(2)
    ground.throttler.check_integrity()
    late = 29 - ground.throttler.loads.in_all.entries - 1  # nobody who is told later stands there
    tasks[1].cancel()
    told = [ground.throttler.shedding.counts[Reason.LATE, PriorityClass.INTERACTIVE]]
    while told[-1] < late and len(told) < late:
        await asyncio.sleep(0)
        told.append(ground.throttler.shedding.counts[Reason.LATE, PriorityClass.INTERACTIVE])
    await run_loop()
    assert sum(task.done() and not task.cancelled() and task.exception() is not None for task in tasks) == late
    await ground.leave(*(task for task in tasks if not task.done()))
    return told


async def test_late_requests_are_shed_a_few_per_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands in the loop's way for a moment only: a slot that comes free meanwhile is given on. The control tells
    them all at once.
    """
    assert await _told_by_rounds(Ground()) == [8, 16, 18]
    monkeypatch.setattr(load_shedding, "REFUSALS_PER_TICK", 1000)
    assert await _told_by_rounds(Ground()) == [19]


@pytest.mark.parametrize("another", [pytest.param(True, id="another waits"), pytest.param(False, id="nobody else")])
async def test_slot_goes_to_a_request_that_can_finish_in_time(another: bool) -> None:
    """One whose answer takes two seconds has a bit more left after it waited for two: another one has the slot; alone
    it may try.
    """

    ground = Ground()
    holding = await ground.paced()
    hasty = await ground.ask(ASK, in_s=3.9)
    patient = [await ground.ask(ASK)] if another else []
    ground.now.now_s += 2.0
    ground.release(holding, ASK)
    await run_loop()
    if another:
        assert isinstance(failure_of(hasty), DeadlineTooShort)
        assert patient[0].result() is holding
    else:
        assert hasty.result() is holding
    ground.throttler.check_integrity()


async def test_shed_requests_get_503_with_retry_after(tmp_path: Path) -> None:
    """A batch that waits is told by 503 and `Retry-After` when an interactive one comes; a tenant that holds the whole
    queue by 429 when another one comes. Each has its record, the metric says why.
    """

    async with world(tmp_path, queue_requests_in_all=2, queue_requests=2) as here:

        def send(**headers: str) -> asyncio.Task[ReceivedResponse]:
            return asyncio.create_task(here.post(body=CHAT, **headers))

        batch = send(x_kelvin_priority="batch")
        await here.wait_for_queued(1)
        first = send()
        await here.wait_for_queued(2)
        second = send()
        got = await batch
        assert (got.status, got.code, got.headers["retry-after"]) == (503, "displaced", "1")
        assert b"this batch request made way" in got.body
        got = await send(x_kelvin_priority="standard")
        assert (got.status, got.code) == (503, "overloaded")
        theirs = asyncio.create_task(here.post(body=CHAT | {"model": "theirs"}, key=STRANGER))
        got = await second
        assert (got.status, got.code, got.headers["retry-after"]) == (429, "over_share", "1")
        shed = await here.series("kelvin_requests_shed_total")
        assert {(labels["why"], labels["rank"], count) for labels, count in shed} == {
            ("displaced", "batch", 1), ("full", "standard", 1), ("over_share", "interactive", 1),
        }  # fmt: skip
        await here.replica("a")
        assert (await first).status == 200
        theirs.cancel()
        records = await here.control.wait_for_records(4)
        assert [record.outcome for record in records[:4]] == ["displaced", "overloaded", "over_share", "ok"]


@pytest.mark.parametrize("away", ["draining", "resting"])
async def test_version_without_open_replicas_keeps_its_queue(away: str) -> None:
    """When no replica takes requests, the pace of the version says nothing about a wait: nobody is refused for it, a
    full queue still sheds, and no entry is left behind.
    """

    ground = Ground(queue_limits(version=2))
    holding = await ground.paced()
    stays, batch = await ground.ask(ASK), await ground.ask(BATCH)
    if away == "draining":
        ground.feed(replica_row("a", 1, draining=True))
    else:
        ground.throttler.report_failed(holding)
    ground.now.now_s += 1.0  # beyond the next sweep
    ground.release(holding, ASK, 0)
    await run_loop(4)
    assert not stays.done()
    newcomer = await ground.ask(ASK)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert isinstance(failure_of(await ground.ask(BATCH)), Overloaded)
    ground.feed(replica_row("b", 1))
    await run_loop()
    assert stays.result().row.runtime_id == "b"
    await ground.leave(newcomer)


@pytest.mark.parametrize("step", ["shed", "wake", "breaker"])
async def test_error_while_entering_leaves_no_entry_in_the_queue(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails between an entry's joining the queue and its wait: the entry leaves with its request, and the
    slot that comes next is not given to it.
    """

    ground = Ground(queue_limits(version=1))
    if step == "shed":
        batch = await ground.ask(BATCH)
        monkeypatch.setattr(load_shedding, "wait_s", _fail)
    monkeypatch.setattr(ground.bell, "start_wake", _fail)
    if step == "breaker":
        monkeypatch.setattr(ground.throttler.breakers, "enter", _fail)
    broken = await ground.ask(ASK)
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert ground.throttler.loads.in_all.entries == (1 if step == "shed" else 0)
    if step == "shed":
        await ground.leave(batch)


def _fail(*_: object) -> float:
    raise ZeroDivisionError
