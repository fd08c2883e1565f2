"""A replica that a request was lost with: it rests, one request tries, and an answer lets all in again."""

import asyncio

import msgspec
import pytest

from activator.keys import VersionKey
from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.affinity import read_affinity
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.throttler import NoSlotInTime, Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from tests.activator.control import VERSION, replica_row
from tests.activator.test_throttler import Bell

KEY = VersionKey("default", "m", VERSION)
WIDE = Bound(500, 100_000, 100_000)


class Ground:
    """A throttler on a clock that is set, and those who ask."""

    def __init__(self, *replicas: str) -> None:
        self.now_s = 100.0
        self.throttler = Throttler(QueueLimits(WIDE, WIDE, WIDE, 60.0), Bell(), clock=lambda: self.now_s)
        self.throttler.apply(Feed(revision=1, replicas=tuple(replica_row(name, 4) for name in replicas)))

    async def take(self, ask: Ask) -> Replica:
        """A slot, which is free."""
        return await asyncio.wait_for(self.throttler.acquire(KEY, ask, Deadline.after(60.0, self.now_s)), 5)

    async def lose(self, name: str) -> None:
        """With a request, and what it was resting for has passed."""
        taken: list[tuple[Ask, Replica]] = []
        while not taken or taken[-1][1].row.runtime_id != name:
            ask = ask_of()
            taken.append((ask, await self.take(ask)))
        ask, replica = taken.pop()
        for other, where in taken:
            self.throttler.slots.release(KEY, where, other, 0)
        self.throttler.report_failed(replica, "replica_lost")
        self.throttler.slots.release(KEY, replica, ask, 0)
        assert replica.breaker is not None
        self.now_s += replica.breaker.remaining_s(self.now_s)
        replica.breaker.state(self.now_s)


def ask_of(prefix: int | None = None) -> Ask:
    """Of one request: no other one is the same."""
    affinity = None if prefix is None else read_affinity("default", None, str(prefix).encode())
    return Ask("default", 10, 10, affinity=affinity)


@pytest.mark.parametrize("affine", [False, True])
async def test_one_request_tries_it_and_the_others_go_elsewhere(affine: bool) -> None:
    """Also those that belong there; an answer lets them in again, and a second loss is twice as long."""

    ground = Ground("a", "b", "c", "d")
    await ground.lose("a")
    taken = [(await ground.take(ask_of(n if affine else None))).row.runtime_id for n in range(13)]
    assert taken.count("a") == 1, "one tries"
    assert sorted(taken) == sorted(["a", *"bcd" * 4]), "the others have every slot of the others"
    waiting = asyncio.create_task(ground.take(ask_of()))
    await asyncio.sleep(0)
    replica = ground.throttler._lines[KEY].replicas["a"]
    ground.throttler.check_integrity()
    ground.throttler.report_began(replica, None)
    assert (await waiting).row.runtime_id == "a"
    assert replica.breaker is None


async def test_who_tries_and_leaves_makes_room() -> None:
    """Whoever had a slot of it before is not the one who tries."""

    ground = Ground("a")
    before = ask_of()
    await ground.take(before)
    await ground.lose("a")
    first, second = ask_of(), ask_of()
    replica = await ground.take(first)
    waiting = asyncio.create_task(ground.take(second))
    await asyncio.sleep(0)
    ground.throttler.slots.release(KEY, replica, before, None)
    await asyncio.sleep(0)
    assert not waiting.done(), "one tries still"
    ground.throttler.slots.release(KEY, replica, first, 0)
    assert await waiting is replica


@pytest.mark.parametrize(
    ("removed", "draining", "is_told"),
    [
        pytest.param((), False, True, id="it rests"),
        pytest.param(("a",), False, False, id="it is gone, so a start is awaited"),
        pytest.param((), True, False, id="it drains, likewise"),
    ],
)
async def test_who_may_wait_for_so_long_is_told(removed: tuple[str, ...], draining: bool, is_told: bool) -> None:
    """And leaves nothing behind. Who waits for a start goes on waiting in its place, until it is granted."""

    ground = Ground("a")
    replica = await ground.take(ask := ask_of())
    ground.throttler.report_failed(replica)
    ground.throttler.slots.release(KEY, replica, ask, 0)
    rows = (msgspec.structs.replace(replica_row("a", 4), draining=True),) if draining else ()
    ground.throttler.apply(Feed(revision=2, full=False, replicas=rows, removed_replicas=removed))
    deadline = Deadline.after(60.0, ground.now_s)
    waiting = asyncio.create_task(ground.throttler.acquire(KEY, ask_of(), deadline, ground.now_s))
    await asyncio.wait((waiting,), timeout=None if is_told else 0.05)
    assert waiting.done() == is_told
    assert ground.throttler.queued(KEY) == (not is_told)
    ground.throttler.check_integrity()
    if is_told:
        assert isinstance(waiting.exception(), NoSlotInTime)
    else:
        ground.throttler.apply(Feed(revision=3, full=False, replicas=(replica_row("b", 4),)))
        assert (await waiting).row.runtime_id == "b"
    ground.throttler.check_integrity()


def test_a_slot_that_comes_as_the_time_ends_is_used_or_given_back() -> None:
    """Granted and out of time in one step of the loop, cancelled or not: the slot is somebody's, or free."""

    async def scenario(is_cancelled: bool) -> None:
        ground = Ground("a")
        held = [(ask, await ground.take(ask)) for ask in (ask_of(), ask_of(), ask_of(), ask_of())]
        deadline = Deadline.after(60.0, ground.now_s)
        waiting = asyncio.create_task(ground.throttler.acquire(KEY, last := ask_of(), deadline, ground.now_s + 60.0))
        await asyncio.sleep(0)
        ask, replica = held.pop()
        ground.throttler.slots.release(KEY, replica, ask, 0)
        if is_cancelled:
            waiting.cancel()
            await asyncio.wait((waiting,))
        else:
            ground.throttler.slots.release(KEY, await waiting, last, 0)
        assert replica.running == 3
        ground.throttler.check_integrity()

    asyncio.run(scenario(False))
    asyncio.run(scenario(True))
