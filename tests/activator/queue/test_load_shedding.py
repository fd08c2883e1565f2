"""Shedding in a full queue: more urgent requests displace others, and requests that can't meet their deadline are
refused while they wait.
"""

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
REQUEST, BATCH = QueuedRequest("t", 10, 10), QueuedRequest("t", 10, 10, PriorityClass.BATCH)


class SheddingWorld(SlotWorld):
    """A throttler whose clock stands at 100 s."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.now = Clock(100.0)
        super().__init__(limits=limits, clock=self.now)

    async def measure_one_slot(self) -> Replica:
        """Measure one slot at two seconds per ten tokens. Return its replica, with the slot taken."""
        self.feed(replica_row("a", 1))
        await self.measure_throughput(self.now, REQUEST)
        return await self.acquire(REQUEST)


async def test_full_queue_sheds_the_lowest_request() -> None:
    """Two may wait. An interactive request displaces a batch one, then a batch newcomer is refused. A second tenant
    displaces a request of the one that holds both places.
    """

    shedding_world = SheddingWorld(queue_limits(version=2))
    batch, stays = await shedding_world.start_request(BATCH), await shedding_world.start_request(REQUEST)
    newest = await shedding_world.start_request(REQUEST)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert isinstance(failure_of(await shedding_world.start_request(BATCH)), Overloaded)
    other = await shedding_world.start_request(QueuedRequest("u", 10, 10))
    assert failure_of(newest) == ShedByFairShare(1.0)
    counts = shedding_world.throttler.load_shedder.counts
    assert counts == {
        (Reason.DISPLACED, PriorityClass.BATCH): 1, (Reason.FULL, PriorityClass.BATCH): 1, (Reason.OVER_SHARE,
        PriorityClass.INTERACTIVE): 1,
    }  # fmt: skip
    await shedding_world.cancel_requests(stays, other)


def test_refused_queued_request_is_freed_at_once() -> None:
    """No reference cycle keeps its frames and its request alive until a garbage collection. At ten times the load there
    were a hundred thousand such objects, and collecting them delayed all requests.
    """

    async def refused(shedding_world: SheddingWorld) -> "weakref.ref[Refused]":
        try:
            await shedding_world.acquire(BATCH)
        except Refused as error:
            return weakref.ref(error)
        raise AssertionError

    async def scenario() -> None:
        shedding_world = SheddingWorld(queue_limits(version=1))
        batch = asyncio.create_task(refused(shedding_world))
        await run_loop()
        stays = await shedding_world.start_request(REQUEST)
        assert (await batch)() is None
        await shedding_world.cancel_requests(stays)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


async def test_version_without_requests_is_no_longer_woken() -> None:
    """Its version has no other request, so it is no longer woken."""

    shedding_world = SheddingWorld(queue_limits(total=1))
    batch = await shedding_world.start_request(BATCH, key=OTHER)
    assert shedding_world.waker.waking == {OTHER}
    stays = await shedding_world.start_request(REQUEST)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert shedding_world.waker.waking == {KEY}
    await shedding_world.cancel_requests(stays)


async def test_request_with_a_slot_is_not_shed() -> None:
    """This holds even before the request's task has run."""

    shedding_world = SheddingWorld(queue_limits(version=1))
    batch = asyncio.create_task(shedding_world.acquire(BATCH))
    await asyncio.sleep(0)
    shedding_world.feed(replica_row("a", 1))
    assert not batch.done()
    waits, refused = await shedding_world.start_request(REQUEST), await shedding_world.start_request(REQUEST)
    assert (await batch).row.runtime_id == "a"
    assert isinstance(failure_of(refused), Overloaded)
    await shedding_world.cancel_requests(waits)


async def test_cancelled_entry_makes_room_and_is_not_counted() -> None:
    """The task of a queued request was cancelled but is still in the queue. It is not counted as shed."""

    shedding_world = SheddingWorld(queue_limits(version=1))
    batch = await shedding_world.start_request(BATCH)
    batch.cancel()
    stays = asyncio.create_task(shedding_world.acquire(REQUEST))
    await run_loop()
    assert batch.cancelled()
    assert not stays.done()
    assert not shedding_world.throttler.load_shedder.counts
    await shedding_world.cancel_requests(stays)


async def test_request_that_is_too_late_displaces_nobody() -> None:
    """It is refused for its deadline before any request is shed."""

    shedding_world = SheddingWorld(queue_limits(version=2))
    await shedding_world.measure_one_slot()
    stay = [await shedding_world.start_request(BATCH), await shedding_world.start_request(REQUEST, in_s=2.5)]
    late = await shedding_world.start_request(REQUEST, in_s=3.0)
    assert failure_of(late) == DeadlineTooShort(4.0, 3.0, False)
    await shedding_world.cancel_requests(*stay)


async def test_retry_time_is_until_the_queue_is_empty() -> None:
    """Thirty tokens wait, and ten take two seconds, so the retry time is 6 s."""

    shedding_world = SheddingWorld(queue_limits(version=3))
    await shedding_world.measure_one_slot()
    batch = await shedding_world.start_request(BATCH)
    stay = [await shedding_world.start_request(REQUEST) for _ in range(3)]
    assert failure_of(batch) == ShedByPriority("batch", 6.0)
    await shedding_world.cancel_requests(*stay)


async def _overtaken(shedding_world: SheddingWorld) -> list["asyncio.Task[Replica]"]:
    """The second of three requests had enough time until the third came before it. A slot has come free since."""
    holding = await shedding_world.measure_one_slot()
    first, second = (
        await shedding_world.start_request(REQUEST, in_s=3.0),
        await shedding_world.start_request(REQUEST, in_s=6.5),
    )
    third = await shedding_world.start_request(REQUEST, in_s=5.5)
    assert not second.done()
    shedding_world.now.now_s += 1.0
    shedding_world.release(holding, REQUEST)
    await run_loop(2)
    assert first.done()
    assert not second.done()  # the slot goes to a request first
    await run_loop()
    return [second, third]


@pytest.mark.parametrize("sweeps", [pytest.param(True, id="with sweeps"), pytest.param(False, id="control: no sweeps")])
async def test_overtaken_request_is_shed_before_its_deadline(sweeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at a sweep, not at its deadline. Control: no sweep."""
    if not sweeps:
        monkeypatch.setattr(load_shedding, "SWEEP_S", 1e9)
    shedding_world = SheddingWorld()
    second, third = await _overtaken(shedding_world)
    assert second.done() is sweeps
    if sweeps:
        assert isinstance(failure := failure_of(second), DeadlineTooShort)
        assert failure.expected_s > failure.remaining_s == 5.5
        assert shedding_world.throttler.load_shedder.counts == {(Reason.LATE, PriorityClass.INTERACTIVE): 1}
    await shedding_world.cancel_requests(*(task for task in (second, third) if not task.done()))


async def _count_late_per_tick(shedding_world: SheddingWorld) -> list[int]:
    """Each of thirty requests comes before the earlier ones, so most can't be in time. One gives up. Return how many
    were refused after each loop iteration, once a slot came free.
    """
    holding = await shedding_world.measure_one_slot()
    tasks = [await shedding_world.start_request(REQUEST, in_s=20.0 - 0.1 * number) for number in range(30)]
    shedding_world.release(holding, REQUEST)
    await run_loop(2)
    shedding_world.throttler.check_integrity()
    late = (
        29 - shedding_world.throttler.usage_by_tenant.total.entries - 1
    )  # entries that will be refused are no longer counted
    tasks[1].cancel()
    late_counts = [shedding_world.throttler.load_shedder.counts[Reason.LATE, PriorityClass.INTERACTIVE]]
    while late_counts[-1] < late and len(late_counts) < late:
        await asyncio.sleep(0)
        late_counts.append(shedding_world.throttler.load_shedder.counts[Reason.LATE, PriorityClass.INTERACTIVE])
    await run_loop()
    assert sum(task.done() and not task.cancelled() and task.exception() is not None for task in tasks) == late
    await shedding_world.cancel_requests(*(task for task in tasks if not task.done()))
    return late_counts


async def test_late_requests_are_shed_a_few_per_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is not blocked, and a slot that comes free meanwhile is assigned. Control: all are refused at once."""
    assert await _count_late_per_tick(SheddingWorld()) == [8, 16, 18]
    monkeypatch.setattr(load_shedding, "REFUSALS_PER_TICK", 1000)
    assert await _count_late_per_tick(SheddingWorld()) == [19]


@pytest.mark.parametrize(
    "another", [pytest.param(True, id="another request waits"), pytest.param(False, id="no other request")]
)
async def test_slot_goes_to_a_request_that_can_finish_in_time(another: bool) -> None:
    """A request that has waited two seconds needs a margin on its answer time of two seconds. Another request gets the
    slot; if there is none, it may try.
    """

    shedding_world = SheddingWorld()
    holding = await shedding_world.measure_one_slot()
    hasty = await shedding_world.start_request(REQUEST, in_s=3.9)
    patient = [await shedding_world.start_request(REQUEST)] if another else []
    shedding_world.now.now_s += 2.0
    shedding_world.release(holding, REQUEST)
    await run_loop()
    if another:
        assert isinstance(failure_of(hasty), DeadlineTooShort)
        assert patient[0].result() is holding
    else:
        assert hasty.result() is holding
    shedding_world.throttler.check_integrity()


async def test_shed_requests_get_503_with_retry_after(tmp_path: Path) -> None:
    """A displaced batch request gets 503 with `Retry-After`. A tenant that fills the queue gets 429 when another one
    comes. Each has a record, and the metric has the reason.
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
    """While no replica accepts requests, the throughput says nothing about the wait, so none is refused for it. A full
    queue still sheds, and no entry is left behind.
    """

    shedding_world = SheddingWorld(queue_limits(version=2))
    holding = await shedding_world.measure_one_slot()
    stays, batch = await shedding_world.start_request(REQUEST), await shedding_world.start_request(BATCH)
    if away == "draining":
        shedding_world.feed(replica_row("a", 1, draining=True))
    else:
        shedding_world.throttler.report_failed(holding)
    shedding_world.now.now_s += 1.0  # beyond the next sweep
    shedding_world.release(holding, REQUEST, 0)
    await run_loop(4)
    assert not stays.done()
    newcomer = await shedding_world.start_request(REQUEST)
    assert failure_of(batch) == ShedByPriority("batch", 1.0)
    assert isinstance(failure_of(await shedding_world.start_request(BATCH)), Overloaded)
    shedding_world.feed(replica_row("b", 1))
    await run_loop()
    assert stays.result().row.runtime_id == "b"
    await shedding_world.cancel_requests(newcomer)


@pytest.mark.parametrize("step", ["shed", "wake", "breaker"])
async def test_error_while_entering_leaves_no_entry_in_the_queue(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between joining the queue and waiting removes the entry, and the next slot is not assigned to it."""

    shedding_world = SheddingWorld(queue_limits(version=1))
    if step == "shed":
        batch = await shedding_world.start_request(BATCH)
        monkeypatch.setattr(load_shedding, "wait_s", _fail)
    monkeypatch.setattr(shedding_world.waker, "start_wake", _fail)
    if step == "breaker":
        monkeypatch.setattr(shedding_world.throttler.version_breakers, "enter", _fail)
    broken = await shedding_world.start_request(REQUEST)
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert shedding_world.throttler.usage_by_tenant.total.entries == (1 if step == "shed" else 0)
    if step == "shed":
        await shedding_world.cancel_requests(batch)


def _fail(*_: object) -> float:
    raise ZeroDivisionError
