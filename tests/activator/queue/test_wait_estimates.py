"""Wait estimates: a request whose deadline is too short is refused at once, and wakes the version all the same."""

import asyncio

import msgspec

from activator.queue.policy.queued_request import PriorityClass
from activator.queue.policy.wait_estimate import MIN_ANSWERS, UNKNOWN, WaitEstimate
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.start_forecast import Forecast, StartRow
from kelvin.contracts.traffic_errors import DeadlineTooShort
from tests.activator.clock import Clock
from tests.activator.control import VERSION, replica_row
from tests.activator.queue.slot_world import FAILED, KEY, REQUEST, SlotWorld, failure_of

NAMES = {"tenant": "default", "model": "m", "version": VERSION}
START = Feed(revision=1, starts=(StartRow(start_ms=9000, **NAMES),))
FORECAST = Feed(revision=1, forecasts=(Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=1500),))
READY = replica_row("a", 1)


async def _refused(here: SlotWorld, seconds: float) -> DeadlineTooShort | None:
    """Return the refusal of a request with so many seconds left, or None if it waits. The request is cancelled."""
    request_task = await here.start_request(in_s=seconds)
    if not request_task.done():
        request_task.cancel()
        await asyncio.wait((request_task,))
        return None
    failure = failure_of(request_task)
    assert isinstance(failure, DeadlineTooShort)
    return failure


def _left(here: SlotWorld) -> float | None:
    return here.throttler.estimate_queued_wait(KEY, REQUEST, Deadline(200.0)).remaining_s


async def test_waiting_request_reports_the_forecast_time() -> None:
    """The time decreases, never below zero. It is unknown once a replica exists or the start failed."""

    clock = Clock(100.0)
    here = SlotWorld(clock=clock)
    assert _left(here) is None
    waiting = await here.start_request(in_s=30.0)
    assert _left(here) is None
    here.throttler.apply(FORECAST)
    assert _left(here) == 1.5
    clock.now_s = 101.0
    assert _left(here) == 0.5
    clock.now_s = 105.0
    assert _left(here) == 0.0
    here.feed(READY)
    assert _left(here) is None
    here.feed(removed_replicas=("a",))
    assert _left(here) is None, "the forecast was of the previous start"
    await waiting
    here.throttler.check_integrity()


async def test_a_start_that_takes_too_long_refuses_at_once_and_begins() -> None:
    """A request with enough time waits. A running start ends earlier than one that has to begin."""

    here = SlotWorld(clock=Clock(100.0))
    assert await _refused(here, 0.5) is None, "nothing is known"
    here.throttler.apply(START)
    assert await _refused(here, 9.5) is None
    assert not here.waker.timed_wakes
    assert await _refused(here, 2.0) == DeadlineTooShort(9.0, 2.0, True)
    assert (here.waker.timed_wakes, here.waker.waking) == ({KEY: 9.0}, set())
    here.throttler.apply(FORECAST)
    assert await _refused(here, 2.0) is None
    assert await _refused(here, 1.0) == DeadlineTooShort(1.5, 1.0, True)
    here.feed(READY)
    assert not here.waker.timed_wakes
    assert repr(here.throttler.slot_allocator) == "<SlotAllocator versions=1 running=0 queued=0>"
    here.throttler.check_integrity()


async def test_estimate_wait_of_a_new_request() -> None:
    """The wait is for a start, unless starts fail. With a replica it is for the queued requests of the tenant in the
    same or a higher class.
    """

    clock = Clock(100.0 - 2 * MIN_ANSWERS)
    here = SlotWorld(clock=clock)
    estimate_wait, wake_for = here.throttler.estimate_new_request_wait, here.throttler.wake_for
    assert estimate_wait(KEY, "default", PriorityClass.BATCH) == (None, True)
    here.throttler.apply(START)
    assert estimate_wait(KEY, "default", PriorityClass.BATCH) == (9.0, True)
    wake_for(KEY, 9.0)
    assert here.waker.timed_wakes == {KEY: 9.0}
    here.feed(failures=(FAILED,))
    assert estimate_wait(KEY, "default", PriorityClass.BATCH) == (None, True), "the next request has to try"
    here.feed(READY)
    wake_for(KEY, 9.0)
    assert not here.waker.timed_wakes, "a replica exists"
    await here.measure_throughput(clock)
    asks = [
        REQUEST,
        REQUEST,
        msgspec.structs.replace(REQUEST, priority_class=PriorityClass.BATCH),
        msgspec.structs.replace(REQUEST, tenant="other"),
    ]
    tasks = [await here.start_request(ask) for ask in asks]
    assert estimate_wait(KEY, "default", PriorityClass.INTERACTIVE) == (2.0, False), "one runs, one waits"
    assert estimate_wait(KEY, "default", PriorityClass.BATCH) == (4.0, False)
    assert estimate_wait(KEY, "other", PriorityClass.STANDARD) == (2.0, False)
    assert estimate_wait(KEY, "nobody", PriorityClass.BATCH) == (0.0, False)
    await here.cancel_requests(*tasks)


async def test_failed_start_is_not_requested_again() -> None:
    """Otherwise each refused request would start the version again."""

    here = SlotWorld(clock=Clock(100.0))
    here.throttler.apply(START)
    assert await _refused(here, 2.0) is not None
    here.feed(failures=(FAILED,))
    assert not here.waker.timed_wakes


async def test_a_queue_that_takes_too_long_refuses_at_once() -> None:
    """One slot takes two seconds for ten tokens. Only requests with an earlier deadline count."""

    clock = Clock(100.0 - 2 * MIN_ANSWERS)
    here = SlotWorld(READY, clock=clock)
    await here.measure_throughput(clock)
    assert clock.now_s == 100.0
    running = await here.acquire()
    assert await _refused(here, 0.1) is None, "no request waits before it"
    waiting = [await here.start_request(in_s=3.0) for _ in range(3)]
    later = await here.start_request(in_s=300.0)
    assert here.throttler.estimate_queued_wait(KEY, REQUEST, Deadline(110.0)) == WaitEstimate(6.0)
    assert await _refused(here, 5.0) == DeadlineTooShort(8.0, 5.0, False)
    assert await _refused(here, 7.5) is not None, "its answer takes two seconds, too"
    assert await _refused(here, 8.5) is None
    assert await _refused(here, 2.0) is None, "it is served before those that have more time"
    assert not here.waker.timed_wakes
    here.release(running)
    assert await waiting[0] is running
    await here.cancel_requests(*waiting[1:], later)


def test_forecasts_are_kept_per_model_and_version() -> None:
    """Another model of the same version has its own starts."""
    here = SlotWorld(clock=Clock(100.0))
    here.throttler.apply(START)
    other = VersionKey("default", "n", VERSION)
    assert here.throttler.estimate_queued_wait(other, REQUEST, Deadline(200.0)) == UNKNOWN
