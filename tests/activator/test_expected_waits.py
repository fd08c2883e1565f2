"""Who has too little time is told so at once, by what is known, and wakes the version all the same."""

import asyncio

import msgspec

from activator.keys import VersionKey
from activator.policy.ask import Ask, Rank
from activator.policy.expected import LEAST, UNKNOWN, Outlook
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from contracts.errors import Refused
from contracts.forecast import Forecast, StartRow
from contracts.traffic_errors import DeadlineTooShort
from tests.activator.control import VERSION, replica_row
from tests.activator.test_throttler import ASK, FAILED, KEY, LIMITS, Bell

NAMES = {"tenant": "default", "model": "m", "version": VERSION}
STANDING = Feed(revision=1, starts=(StartRow(start_ms=9000, **NAMES),))
STARTING = Feed(revision=1, forecasts=(Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=1500),))
READY = Feed(revision=1, replicas=(replica_row("a", 1),))


class Clock:
    """Seconds, as the test says."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _refused(throttler: Throttler, seconds: float, ask: Ask = ASK) -> DeadlineTooShort | None:
    """Why a request with so much time is refused at once; None where it waits. It doesn't stay."""
    asked = asyncio.ensure_future(throttler.acquire(KEY, ask, Deadline.after(seconds, 100.0)))
    await _turns()
    if not asked.done():
        asked.cancel()
        await asyncio.wait((asked,))
        return None
    error = asked.exception()
    assert isinstance(error, Refused)
    assert isinstance(error.failure, DeadlineTooShort)
    return error.failure


def _left(throttler: Throttler) -> float | None:
    return throttler.outlook(KEY, ASK, Deadline(200.0)).remaining_s


async def test_who_waits_is_told_how_long_as_far_as_it_was_said() -> None:
    """Less and less, never below zero; nothing once a replica is there, or the start failed."""

    clock = Clock()
    throttler = Throttler(LIMITS, Bell(), clock=clock, draw=lambda n: 0)
    assert _left(throttler) is None
    waiting = asyncio.create_task(throttler.acquire(KEY, ASK, Deadline(130.0)))
    await _turns()
    assert _left(throttler) is None
    throttler.apply(STARTING)
    assert _left(throttler) == 1.5
    clock.now_s = 101.0
    assert _left(throttler) == 0.5
    clock.now_s = 105.0
    assert _left(throttler) == 0.0
    throttler.apply(READY)
    assert _left(throttler) is None
    throttler.apply(Feed(revision=1, removed_replicas=("a",)))
    assert _left(throttler) is None, "what was said was of the start before"
    await waiting
    throttler.check_integrity()


async def test_a_start_that_takes_too_long_refuses_at_once_and_begins() -> None:
    """Who has the time waits; a start under way is nearer its end than one that has to begin."""

    bell = Bell()
    throttler = Throttler(LIMITS, bell, clock=Clock(), draw=lambda n: 0)
    assert await _refused(throttler, 0.5) is None, "nothing is known"
    throttler.apply(STANDING)
    assert await _refused(throttler, 9.5) is None
    assert not bell.nudged
    assert await _refused(throttler, 2.0) == DeadlineTooShort(9.0, 2.0, True)
    assert (bell.nudged, bell.ringing) == ({KEY: 9.0}, set())
    throttler.apply(STARTING)
    assert await _refused(throttler, 2.0) is None
    assert await _refused(throttler, 1.0) == DeadlineTooShort(1.5, 1.0, True)
    throttler.apply(READY)
    assert not bell.nudged
    assert repr(throttler.slots) == "<Slots versions=1 running=0 queued=0>"
    throttler.check_integrity()


async def test_what_one_more_would_wait() -> None:
    """For a start, as long as it is not known to fail; else for what its tenant has waiting, as urgent or more."""

    clock, bell = Clock(), Bell()
    throttler = Throttler(LIMITS, bell, clock=clock, draw=lambda n: 0)
    assert throttler.wait_of(KEY, "default", Rank.BATCH) == (None, True)
    throttler.apply(STANDING)
    assert throttler.wait_of(KEY, "default", Rank.BATCH) == (9.0, True)
    throttler.want(KEY, 9.0)
    assert bell.nudged == {KEY: 9.0}
    throttler.apply(Feed(revision=1, failures=(FAILED,)))
    assert throttler.wait_of(KEY, "default", Rank.BATCH) == (None, True), "somebody has to find out"
    throttler.apply(READY)
    throttler.want(KEY, 9.0)
    assert not bell.nudged, "it is there"
    clock.now_s = 100.0 - 2 * LEAST
    for _ in range(LEAST):
        replica = await throttler.acquire(KEY, ASK, Deadline(500.0))
        clock.now_s += 2.0
        throttler.slots.release(KEY, replica, ASK, None)
    asks = [ASK, ASK, msgspec.structs.replace(ASK, rank=Rank.BATCH), msgspec.structs.replace(ASK, tenant="other")]
    tasks = [asyncio.ensure_future(throttler.acquire(KEY, ask, Deadline(500.0))) for ask in asks]
    await _turns()
    assert throttler.wait_of(KEY, "default", Rank.INTERACTIVE) == (2.0, False), "one runs, one waits"
    assert throttler.wait_of(KEY, "default", Rank.BATCH) == (4.0, False)
    assert throttler.wait_of(KEY, "other", Rank.STANDARD) == (2.0, False)
    assert throttler.wait_of(KEY, "nobody", Rank.BATCH) == (0.0, False)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_start_that_failed_is_asked_for_no_more() -> None:
    """Else whoever was refused would have it begun again and again."""

    bell = Bell()
    throttler = Throttler(LIMITS, bell, clock=Clock(), draw=lambda n: 0)
    throttler.apply(STANDING)
    assert await _refused(throttler, 2.0) is not None
    throttler.apply(Feed(revision=1, failures=(FAILED,)))
    assert not bell.nudged


async def test_a_queue_that_takes_too_long_refuses_at_once() -> None:
    """By the pace of one slot: ten tokens in two seconds. Only who is served first counts: not who has more time."""

    clock, bell = Clock(), Bell()
    throttler = Throttler(LIMITS, bell, clock=clock, draw=lambda n: 0)
    throttler.apply(READY)
    clock.now_s = 100.0 - 2 * LEAST
    for _ in range(LEAST):
        replica = await throttler.acquire(KEY, ASK, Deadline(500.0))
        clock.now_s += 2.0
        throttler.slots.release(KEY, replica, ASK, None)
    assert clock.now_s == 100.0
    running = await throttler.acquire(KEY, ASK, Deadline(500.0))
    assert await _refused(throttler, 0.1) is None, "nobody waits before it"
    waiting = [asyncio.ensure_future(throttler.acquire(KEY, ASK, Deadline(103.0))) for _ in range(3)]
    later = asyncio.ensure_future(throttler.acquire(KEY, ASK, Deadline(400.0)))
    await _turns()
    assert throttler.outlook(KEY, ASK, Deadline(110.0)) == Outlook(6.0)
    assert await _refused(throttler, 5.0) == DeadlineTooShort(8.0, 5.0, False)
    assert await _refused(throttler, 7.5) is not None, "its answer takes two seconds, too"
    assert await _refused(throttler, 8.5) is None
    assert await _refused(throttler, 2.0) is None, "it is served before those that have more time"
    assert not bell.nudged
    throttler.slots.release(KEY, running, ASK, None)
    assert await asyncio.gather(*waiting[:1])
    for task in (*waiting[1:], later):
        task.cancel()
    await asyncio.wait((*waiting, later))
    throttler.check_integrity()


def test_a_version_is_known_by_all_of_its_name() -> None:
    """Another model of the same version has starts of its own."""
    throttler = Throttler(LIMITS, Bell(), clock=Clock(), draw=lambda n: 0)
    throttler.apply(STANDING)
    other = VersionKey("default", "n", VERSION)
    assert throttler.outlook(other, ASK, Deadline(200.0)) == UNKNOWN
