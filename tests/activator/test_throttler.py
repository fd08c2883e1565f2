"""Slots: in order, never more than there are, none lost, however requests come, wait, leave and replicas change."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.keys import VersionKey
from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask, Rank
from activator.policy.bounds import Bound
from activator.throttler import Throttler
from activator.wake import Waker
from contracts.control import Feed, ReplicaRow, RestoreFailure
from contracts.deadline import Deadline
from contracts.errors import Refused
from contracts.forecast import Forecast, StartRow
from contracts.problem import code_of
from contracts.traffic_errors import DeadlineExceeded, Overloaded
from tests.activator.control import OTHER, VERSION, replica_row, version_row

KEY = VersionKey("default", "m", VERSION)
ASK = Ask("default", 10, 10)
WIDE = Bound(50, 10_000, 10_000)
LIMITS = QueueLimits(WIDE, WIDE, WIDE, 60.0)
FAILED = RestoreFailure(
    tenant="default", version=VERSION, code="probe_failed", status=500, message="no", retryable=False
)
AWAY = RestoreFailure(tenant="default", version=VERSION, code="unavailable", status=503, message="no", retryable=True)


@dataclass
class Bell(Waker):
    """A waker that tells nobody."""

    rung: list[VersionKey] = field(default_factory=list)
    ringing: set[VersionKey] = field(default_factory=set)
    nudged: dict[VersionKey, float] = field(default_factory=dict)

    def ensure(self, key: VersionKey) -> None:
        if key not in self.ringing:
            self.rung.append(key)
            self.ringing.add(key)

    def rest(self, key: VersionKey) -> None:
        self.ringing.discard(key)

    def nudge(self, key: VersionKey, for_s: float) -> None:
        self.nudged[key] = for_s

    def calm(self, tenant: str, version: str) -> None:
        for key in [key for key in self.nudged if (key.tenant, key.version) == (tenant, version)]:
            del self.nudged[key]

    def poked_us(self, key: VersionKey) -> int | None:
        return 1 if key in self.ringing else None


def _throttler(bell: Bell | None = None, limits: QueueLimits = LIMITS) -> Throttler:
    return Throttler(limits, bell or Bell(), draw=lambda n: 0)


def _feed(*rows: ReplicaRow, removed: tuple[str, ...] = (), full: bool = False) -> Feed:
    return Feed(revision=1, full=full, replicas=rows, removed_replicas=removed)


async def _take(throttler: Throttler, seconds: float = 30.0) -> Replica:
    return await throttler.acquire(KEY, ASK, Deadline.after(seconds, asyncio.get_running_loop().time()))


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_order_as_capacity_rises() -> None:
    """One wake for all; the row that brings slots wakes as many as it has, first come first."""

    bell = Bell()
    throttler = _throttler(bell)
    order: list[int] = []

    async def one(number: int) -> Replica:
        replica = await _take(throttler)
        order.append(number)
        return replica

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    await _turns()
    assert bell.rung == [KEY]
    throttler.apply(_feed(replica_row("a", 2)))
    assert KEY not in bell.ringing
    await _turns()
    assert order == [0, 1]
    throttler.apply(_feed(replica_row("b", 1)))
    await _turns()
    assert order == [0, 1, 2]
    throttler.slots.release(KEY, tasks[0].result(), ASK, None)
    await _turns()
    assert order == [0, 1, 2, 3]
    throttler.check_integrity()
    tasks[4].cancel()
    await _turns()
    throttler.check_integrity()


async def test_a_failed_start_tells_everyone_who_waits() -> None:
    """And only them: who comes later starts anew."""

    bell = Bell()
    throttler = _throttler(bell)
    tasks = [asyncio.create_task(_take(throttler)) for _ in range(3)]
    await _turns()
    throttler.apply(Feed(revision=1, failures=(AWAY,)))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, Refused)
        assert code_of(result.failure) == "unavailable"
    late = asyncio.create_task(_take(throttler))
    await _turns()
    assert bell.rung == [KEY, KEY]
    throttler.apply(_feed(replica_row("a")))
    await late


async def test_who_waits_for_a_deleted_version_is_told() -> None:
    """At once, that there is no such model; of another version nobody is."""

    bell = Bell()
    throttler = _throttler(bell)
    waiting = asyncio.create_task(_take(throttler))
    await _turns()
    throttler.apply(Feed(revision=1, removed_versions=((*KEY[:2], "0" * 64), ("other", *KEY[1:]))))
    await _turns()
    assert not waiting.done()
    throttler.apply(Feed(revision=2, removed_versions=(KEY,)))
    with pytest.raises(Refused) as refused:
        await waiting
    assert code_of(refused.value.failure) == "model_not_found"
    assert not bell.ringing
    throttler.check_integrity()


@pytest.mark.parametrize("known", ["nothing", "a standing start", "a start under way"])
async def test_snapshot_without_a_version_refuses_its_waiters(known: str) -> None:
    """A version that was deleted while the feed was away: the snapshot that follows does what the change line would
    have done, to those who wait and to those who would have waited.
    """

    bell, other = Bell(), VersionKey(*KEY[:2], OTHER)
    throttler = _throttler(bell)
    waiting = asyncio.create_task(_take(throttler))
    elsewhere = asyncio.create_task(throttler.acquire(other, ASK, Deadline(1e9)))
    await _turns()
    if known == "a standing start":
        throttler.apply(
            Feed(revision=1, starts=(StartRow(tenant="default", model="m", version=VERSION, start_ms=9000),))
        )
        bell.nudge(KEY, 9.0)
    if known == "a start under way":
        forecast = Forecast(tenant="default", model="m", version=VERSION, ready_in_ms=9000)
        throttler.apply(Feed(revision=1, forecasts=(forecast,)))
    throttler.apply(Feed(revision=5, full=True, versions=(version_row("default", "m", OTHER),)))
    with pytest.raises(Refused) as refused:
        await waiting
    assert code_of(refused.value.failure) == "model_not_found"
    assert not elsewhere.done()
    assert bell.ringing == {other}
    assert not bell.nudged
    assert throttler.wait_of(KEY, "default", Rank.BATCH) == (None, True)
    throttler.check_integrity()
    elsewhere.cancel()
    await _turns()


async def test_a_failed_start_of_another_replica_fails_nobody_who_can_be_served() -> None:
    """A version with a replica has waiters for its slots, not for a start."""

    throttler = _throttler()
    throttler.apply(_feed(replica_row("a", 1)))
    first = await _take(throttler)
    waiting = asyncio.create_task(_take(throttler))
    await _turns()
    throttler.apply(Feed(revision=2, failures=(FAILED,)))
    throttler.slots.release(KEY, first, ASK, None)
    assert await waiting is first


async def test_a_deadline_ends_the_wait() -> None:
    """Too late is a 504 that says what it waited for."""

    throttler = _throttler()
    with pytest.raises(Refused) as refused:
        await _take(throttler, 0.01)
    assert isinstance(refused.value.failure, DeadlineExceeded)
    assert refused.value.failure.stage == "waiting for a replica to start"
    assert throttler.loads.in_all.entries == 0


async def test_a_full_queue_sheds() -> None:
    """The bound in entries."""

    throttler = _throttler(limits=QueueLimits(Bound(1, 100, 100), WIDE, WIDE, 5))
    waiting = asyncio.create_task(_take(throttler))
    await _turns()
    with pytest.raises(Refused) as refused:
        await _take(throttler)
    assert isinstance(refused.value.failure, Overloaded)
    waiting.cancel()
    await _turns()
    assert throttler.loads.in_all.entries == 0


@pytest.mark.parametrize(
    "feed",
    [
        pytest.param(_feed(replica_row("a", draining=True)), id="draining"),
        pytest.param(_feed(removed=("a",)), id="removed"),
        pytest.param(_feed(full=True), id="missing from a snapshot"),
    ],
)
async def test_a_replica_that_closes_takes_nobody(feed: Feed) -> None:
    """Its requests go on; the next one wakes the version again."""

    bell = Bell()
    throttler = _throttler(bell)
    throttler.apply(_feed(replica_row("a", 4)))
    running = await _take(throttler)
    throttler.apply(feed)
    waiting = asyncio.create_task(_take(throttler))
    await _turns()
    assert not waiting.done()
    assert bell.rung == [KEY]
    throttler.slots.release(KEY, running, ASK, None)
    await _turns()
    assert not waiting.done()
    throttler.apply(_feed(replica_row("b", 1)))
    assert (await waiting).row.runtime_id == "b"
    throttler.check_integrity()


async def test_a_lost_replica_rests_for_a_moment() -> None:
    """Nobody is sent to it until it is told otherwise, or a moment has passed."""

    throttler = _throttler()
    throttler.apply(_feed(replica_row("a", 4)))
    replica = await _take(throttler)
    throttler.report_failed(replica)
    throttler.slots.release(KEY, replica, ASK, None)
    assert throttler.is_asleep(KEY)
    assert await _take(throttler, 5.0) is replica  # after a second


async def test_the_less_loaded_of_two_is_taken() -> None:
    """Both drawn by the shell; the choice is policy's."""

    throttler = _throttler()
    throttler.apply(_feed(replica_row("a", 8), replica_row("b", 8)))
    taken = [(await _take(throttler)).row.runtime_id for _ in range(4)]
    assert sorted(taken) == ["a", "a", "b", "b"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "leave", "release", "add", "remove", "drain", "snapshot", "fail", "turn"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


async def _storm(steps: list[tuple[str, int]]) -> None:
    """Random steps; afterwards everybody leaves, and nothing may be left."""
    throttler = _throttler()
    tasks: list[asyncio.Task[Replica]] = []
    for what, which in steps:
        if what == "come":
            tasks.append(asyncio.create_task(_take(throttler)))
        elif what == "leave" and tasks:
            tasks[which % len(tasks)].cancel()
        elif what == "release":
            for task in [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None][:1]:
                tasks.remove(task)
                throttler.slots.release(KEY, task.result(), ASK, None)
        elif what == "add":
            throttler.apply(_feed(replica_row(f"r{which % 3}", 1 + which % 2)))
        elif what == "remove":
            throttler.apply(_feed(removed=(f"r{which % 3}",)))
        elif what == "drain":
            throttler.apply(_feed(replica_row(f"r{which % 3}", 2, draining=True)))
        elif what == "snapshot":
            throttler.apply(_feed(replica_row(f"r{which % 3}", 2), full=True))
        elif what == "fail":
            throttler.apply(Feed(revision=1, failures=(FAILED,)))
        else:
            await _turns(1)
        live = [r for line in throttler._lines.values() for r in line.replicas.values()]
        assert all(replica.running <= 2 for replica in live)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Refused):
            throttler.slots.release(KEY, await task, ASK, None)
    await _turns()
    throttler.apply(_feed(full=True))
    throttler.apply(_feed(replica_row("last", 3)))
    throttler.check_integrity()
    assert throttler.loads.in_all.entries == 0
    for _ in range(3):
        await asyncio.wait_for(_take(throttler), 1)


@given(STEPS)
@settings(max_examples=150)
def test_nothing_leaks_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """After any storm the queue is empty, and every slot of a fresh replica can be had."""
    asyncio.run(_storm(steps))


def test_a_slot_that_leaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a throttler that keeps what a cancelled waiter had been granted is found out."""

    async def scenario() -> int:
        throttler = _throttler()
        throttler.apply(_feed(replica_row("a", 1)))
        holding = await _take(throttler)
        waiting = asyncio.create_task(_take(throttler))
        await _turns()
        throttler.slots.release(KEY, holding, ASK, None)
        waiting.cancel()
        await _turns()
        return holding.running

    assert asyncio.run(scenario()) == 0
    monkeypatch.setattr(Throttler, "_leave", lambda self, key, line, waiter, ask: line.waiting.discard(waiter))
    assert asyncio.run(scenario()) == 1


async def test_a_cancelled_waiter_that_was_just_granted_gives_its_slot_back() -> None:
    """Cancelled between the grant and its own next step: the next in line has the slot, nobody keeps it."""

    throttler = _throttler()
    throttler.apply(_feed(replica_row("a", 1)))
    holding = await _take(throttler)
    first, second = (asyncio.create_task(_take(throttler)) for _ in range(2))
    await _turns()
    throttler.slots.release(KEY, holding, ASK, None)
    first.cancel()
    assert await asyncio.wait_for(second, 1) is holding
    throttler.check_integrity()
    # Cancelled first, then a slot: its future is done, but it still stands in the line.
    third, fourth = (asyncio.create_task(_take(throttler)) for _ in range(2))
    await _turns()
    third.cancel()
    throttler.slots.release(KEY, holding, ASK, None)
    assert await asyncio.wait_for(fourth, 1) is holding
    throttler.check_integrity()
