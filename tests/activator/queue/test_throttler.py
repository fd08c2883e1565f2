"""Throttler: slots are assigned in order, never more than exist, and none is lost, whatever comes and goes."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.queue.policy.queued_request import PriorityClass
from activator.queue.throttler import Throttler
from activator.queue.version_queue import Replica
from activator.routing.policy.version_key import VersionKey
from activator.routing.policy.version_resolution import Availability
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import ReplicaRow
from kelvin.contracts.serving.start_forecast import Forecast, StartRow
from kelvin.contracts.traffic_errors import DeadlineExceeded
from tests.activator.clock import Clock
from tests.activator.control import OTHER, VERSION, replica_row, version_row
from tests.activator.queue.slot_world import FAILED, KEY, REQUEST, SlotWorld, failure_of, queue_limits, run_loop

AWAY = msgspec.structs.replace(FAILED, code="unavailable", status=503, retryable=True)


async def test_waiters_are_served_in_order_as_capacity_rises() -> None:
    """One wake call for all. A row with n slots admits n requests, first come first served."""

    here = SlotWorld()
    order: list[int] = []

    async def one(number: int) -> Replica:
        replica = await here.acquire()
        order.append(number)
        return replica

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    await run_loop()
    assert here.waker.woken == [KEY]
    here.feed(replica_row("a", 2))
    assert KEY not in here.waker.waking
    await run_loop()
    assert order == [0, 1]
    here.feed(replica_row("b", 1))
    await run_loop()
    assert order == [0, 1, 2]
    here.release(tasks[0].result())
    await run_loop()
    assert order == [0, 1, 2, 3]
    here.throttler.check_integrity()
    tasks[4].cancel()
    await run_loop()
    here.throttler.check_integrity()


async def test_failed_start_refuses_all_waiting_requests() -> None:
    """Only waiting requests are refused. A later one wakes the version again."""

    here = SlotWorld()
    tasks = [await here.start_request() for _ in range(3)]
    here.feed(failures=(AWAY,))
    await asyncio.wait(tasks)
    assert [failure_of(task).code for task in tasks] == ["unavailable"] * 3
    late = await here.start_request()
    assert here.waker.woken == [KEY, KEY]
    here.feed(replica_row("a"))
    await late


async def test_deleted_version_refuses_its_waiting_requests() -> None:
    """They get `model_not_found` at once. Requests of another version wait on."""

    here = SlotWorld()
    waiting = await here.start_request()
    here.feed(removed_versions=((*KEY[:2], "0" * 64), ("other", *KEY[1:])))
    await run_loop()
    assert not waiting.done()
    here.feed(removed_versions=(KEY,))
    await asyncio.wait((waiting,))
    assert failure_of(waiting).code == "model_not_found"
    assert not here.waker.waking
    here.throttler.check_integrity()


@pytest.mark.parametrize("known", ["nothing", "a start duration", "a running start"])
async def test_snapshot_without_a_version_refuses_its_waiters(known: str) -> None:
    """The version was deleted while the feed was down. The snapshot that follows refuses its requests and drops its
    forecasts, as the change line would have done.
    """

    here, other = SlotWorld(), VersionKey(*KEY[:2], OTHER)
    waiting, elsewhere = await here.start_request(), await here.start_request(key=other)
    if known == "a start duration":
        here.feed(starts=(StartRow(tenant="default", model="m", version=VERSION, start_ms=9000),))
        here.waker.start_wake_for(KEY, 9.0)
    if known == "a running start":
        here.feed(forecasts=(Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=9000),))
    here.feed(full=True, versions=(version_row("default", "m", OTHER),))
    await asyncio.wait((waiting,))
    assert failure_of(waiting).code == "model_not_found"
    assert not elsewhere.done()
    assert here.waker.waking == {other}
    assert not here.waker.timed_wakes
    assert here.throttler.estimate_new_request_wait(KEY, "default", PriorityClass.BATCH) == (None, True)
    await here.cancel_requests(elsewhere)


async def test_failed_start_of_another_replica_refuses_no_request() -> None:
    """A version with a replica has requests that wait for its slots, not for a start."""

    here = SlotWorld(replica_row("a", 1))
    first, waiting = await here.acquire(), await here.start_request()
    here.feed(failures=(FAILED,))
    here.release(first)
    assert await waiting is first


async def test_a_deadline_ends_the_wait() -> None:
    """The refusal is 504 and says what the request waited for."""

    here = SlotWorld()
    waiting = await here.start_request(in_s=0.01)
    await asyncio.wait((waiting,))
    failure = failure_of(waiting)
    assert isinstance(failure, DeadlineExceeded)
    assert failure.stage == "waiting for a replica to start"
    assert here.throttler.usage_by_tenant.total.entries == 0


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        pytest.param([replica_row("a", draining=True)], {}, id="draining"),
        pytest.param([], {"removed_replicas": ("a",)}, id="removed"),
        pytest.param([], {"full": True}, id="missing from a snapshot"),
    ],
)
async def test_closed_replica_gets_no_requests(rows: list[ReplicaRow], line: dict[str, Any]) -> None:
    """Its running requests go on. The next request wakes the version again."""

    here = SlotWorld(replica_row("a", 4))
    running = await here.acquire()
    here.feed(*rows, **line)
    waiting = await here.start_request()
    assert not waiting.done()
    assert here.waker.woken == [KEY]
    here.release(running)
    await run_loop()
    assert not waiting.done()
    here.feed(replica_row("b", 1))
    assert (await waiting).row.runtime_id == "b"
    here.throttler.check_integrity()


@pytest.mark.virtual_time
async def test_lost_replica_gets_no_requests_for_a_moment() -> None:
    """Requests are sent to it again after a moment."""

    here = SlotWorld(replica_row("a", 4))
    replica = await here.acquire()
    here.throttler.report_failed(replica)
    here.release(replica)
    assert here.throttler.is_asleep(KEY)
    assert await here.acquire(in_s=5.0) is replica
    assert here.clock() == 1.0


async def test_end_of_a_removed_replica_does_not_end_its_successor() -> None:
    """A request found no process at its address, and by then the feed has a new replica of that name: a pod that
    started again. Control: the end of the new one is applied.
    """
    here = SlotWorld(replica_row("a"))
    first = here.replica("a")
    here.feed(removed_replicas=("a",))
    here.feed(replica_row("a"))
    here.throttler.report_ended(first)
    second = here.replica("a")
    assert second is not first
    here.throttler.report_ended(second)
    here.throttler.check_integrity()
    assert not here.throttler.slot_allocator.ensure_version_queue(KEY).replicas


async def test_the_less_loaded_of_two_is_taken() -> None:
    """The candidates are drawn at random; the policy chooses between them."""

    here = SlotWorld(replica_row("a", 8), replica_row("b", 8))
    taken = [(await here.acquire()).row.runtime_id for _ in range(4)]
    assert sorted(taken) == ["a", "a", "b", "b"]


async def test_refused_request_may_try_a_start_now() -> None:
    """A full replica refuses the request and ends. Starts of the version failed meanwhile, long enough ago for one
    trial. This request may be it, though it came before they failed.
    """

    clock = Clock(100.0)
    here = SlotWorld(replica_row("a", 1), clock=clock)
    async with here.throttler.slot(KEY, REQUEST, Deadline(200.0)) as slot:
        here.feed(failures=(FAILED,))
        here.throttler.report_full(slot.replica, 1)
        here.feed(removed_replicas=("a",))
        clock.now_s += 2.0
        exchanging = asyncio.create_task(slot.requeue())
        await run_loop()
        assert not exchanging.done()
        here.feed(replica_row("b", 1))
        await exchanging
        assert slot.replica.row.runtime_id == "b"
    here.throttler.check_integrity()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "leave", "release", "add", "remove", "drain", "snapshot", "fail", "turn"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


async def _storm(steps: list[tuple[str, int]]) -> None:
    """Apply random steps, then cancel all requests. Nothing may be left."""
    here = SlotWorld(limits=queue_limits(version=50))
    tasks: list[asyncio.Task[Replica]] = []
    for what, which in steps:
        if what == "arrive":
            tasks.append(asyncio.create_task(here.acquire(in_s=30.0)))
        elif what == "leave" and tasks:
            tasks[which % len(tasks)].cancel()
        elif what == "release":
            for task in [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None][:1]:
                tasks.remove(task)
                here.release(task.result())
        elif what == "add":
            here.feed(replica_row(f"r{which % 3}", 1 + which % 2))
        elif what == "remove":
            here.feed(removed_replicas=(f"r{which % 3}",))
        elif what == "drain":
            here.feed(replica_row(f"r{which % 3}", 2, draining=True))
        elif what == "snapshot":
            here.feed(replica_row(f"r{which % 3}", 2), full=True)
        elif what == "fail":
            here.feed(failures=(FAILED,))
        else:
            await run_loop(1)
        live = [r for line in here.throttler._version_queues.values() for r in line.replicas.values()]
        assert all(replica.running <= 2 for replica in live)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Refused):
            here.release(await task)
    await run_loop()
    here.feed(full=True)
    here.feed(replica_row("last", 3))
    here.throttler.check_integrity()
    assert here.throttler.usage_by_tenant.total.entries == 0
    for _ in range(3):
        await asyncio.wait_for(here.acquire(), 1)


@given(STEPS)
@settings(max_examples=150)
def test_nothing_leaks_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """After any steps the queue is empty, and every slot of a new replica can be taken."""
    asyncio.run(_storm(steps))


async def test_control_leaked_slot_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a throttler that keeps the slot of a cancelled request is detected."""

    async def running_after_cancellation() -> int:
        here = SlotWorld(replica_row("a", 1))
        holding, waiting = await here.acquire(), await here.start_request()
        here.release(holding)
        waiting.cancel()
        await run_loop()
        return holding.running

    assert await running_after_cancellation() == 0
    monkeypatch.setattr(Throttler, "_leave", lambda self, key, line, waiter, ask: line.waiting.discard(waiter))
    assert await running_after_cancellation() == 1


async def test_request_cancelled_after_its_grant_releases_the_slot() -> None:
    """The request is cancelled between the grant and its next step. The next one gets the slot."""

    here = SlotWorld(replica_row("a", 1))
    holding = await here.acquire()
    first, second = await here.start_request(), await here.start_request()
    here.release(holding)
    first.cancel()
    assert await asyncio.wait_for(second, 1) is holding
    here.throttler.check_integrity()
    # Cancelled first, then granted: its future is done, but it is still in the queue.
    third, fourth = await here.start_request(), await here.start_request()
    third.cancel()
    here.release(holding)
    assert await asyncio.wait_for(fourth, 1) is holding
    here.throttler.check_integrity()


async def test_version_at_its_credit_has_no_room() -> None:
    """Its replica has free streams, which are for other activators."""
    here = SlotWorld(replica_row("a", 4))
    assert here.throttler.availability(KEY) is Availability.ROOM
    replica = await here.acquire()
    replica.max_requests = 1
    assert here.throttler.availability(KEY) is Availability.FULL
    here.release(replica)
    assert here.throttler.availability(KEY) is Availability.ROOM


@pytest.mark.parametrize("is_refused", [True, False], ids=["after a refusal", "while an answer goes on"])
async def test_a_credit_that_has_ended_leaves_room(is_refused: bool) -> None:
    """This holds even if no request came since. Requests go to the previous version while this one has no room."""
    clock = Clock()
    here = SlotWorld(replica_row("a", 4), clock=clock)
    replica = await here.acquire()
    if is_refused:
        here.throttler.report_full(replica, 1)
        here.release(replica, tokens=0)
    else:
        here.throttler.report_response_started(replica, 1)
    assert here.throttler.availability(KEY) is Availability.FULL
    clock.now_s += 3.0
    assert here.throttler.availability(KEY) is Availability.ROOM
