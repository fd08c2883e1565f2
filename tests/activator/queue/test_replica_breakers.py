"""A replica that a request was lost with: it rests, one request tries, and an answer lets all in again."""

import asyncio
import random

import pytest

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.throttler import NoSlotInTime
from activator.queue.version_queue import Replica
from activator.routing.policy.affinity import read_affinity
from tests.activator.clock import Clock
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, SlotWorld, run_loop


class Ground(SlotWorld):
    """Replicas of four slots on a clock that is set, of which requests have those that are drawn."""

    def __init__(self, *replicas: str) -> None:
        self.now = Clock(100.0)
        rows = (replica_row(name, 4) for name in replicas)
        super().__init__(*rows, clock=self.now, draw=random.randrange)

    async def lose(self, name: str) -> None:
        """With a request, and what it was resting for has passed."""
        taken: list[tuple[QueuedRequest, Replica]] = []
        while not taken or taken[-1][1].row.runtime_id != name:
            ask = ask_of()
            taken.append((ask, await self.take(ask)))
        ask, replica = taken.pop()
        for other, where in taken:
            self.release(where, other, 0)
        self.throttler.report_failed(replica, "replica_lost")
        self.release(replica, ask, 0)
        assert replica.breaker is not None
        self.now.now_s += replica.breaker.remaining_s(self.now.now_s)
        replica.breaker.state(self.now.now_s)


def ask_of(prefix: int | None = None) -> QueuedRequest:
    """Of one request: no other one is the same."""
    affinity = None if prefix is None else read_affinity("default", None, str(prefix).encode())
    return QueuedRequest("default", 10, 10, affinity=affinity)


@pytest.mark.parametrize("affine", [False, True])
async def test_one_request_tries_a_failed_replica(affine: bool) -> None:
    """Also those that belong there; an answer lets them in again, and a second loss is twice as long."""

    ground = Ground("a", "b", "c", "d")
    await ground.lose("a")
    taken = [(await ground.take(ask_of(n if affine else None))).row.runtime_id for n in range(13)]
    assert taken.count("a") == 1, "one tries"
    assert sorted(taken) == sorted(["a", *"bcd" * 4]), "the others have every slot of the others"
    waiting = await ground.ask(ask_of())
    replica = ground.replica("a")
    ground.throttler.report_began(replica, None)
    assert (await waiting).row.runtime_id == "a"
    assert replica.breaker is None


async def test_abandoned_trial_of_a_replica_makes_room() -> None:
    """Whoever had a slot of it before is not the one who tries."""

    ground = Ground("a")
    before = ask_of()
    await ground.take(before)
    await ground.lose("a")
    first, second = ask_of(), ask_of()
    replica = await ground.take(first)
    waiting = await ground.ask(second)
    ground.release(replica, before)
    await run_loop()
    assert not waiting.done(), "one tries still"
    ground.release(replica, first, 0)
    assert await waiting is replica


@pytest.mark.parametrize(
    ("removed", "draining", "is_told"),
    [
        pytest.param((), False, True, id="it rests"),
        pytest.param(("a",), False, False, id="it is gone, so a start is awaited"),
        pytest.param((), True, False, id="it drains, likewise"),
    ],
)
async def test_request_with_bounded_wait_is_refused(removed: tuple[str, ...], draining: bool, is_told: bool) -> None:
    """And leaves nothing behind. Who waits for a start goes on waiting in its place, until it is granted."""

    ground = Ground("a")
    replica = await ground.take(ask := ask_of())
    ground.throttler.report_failed(replica)
    ground.release(replica, ask, 0)
    ground.feed(*([replica_row("a", 4, draining=True)] if draining else []), removed_replicas=removed)
    waiting = asyncio.create_task(ground.take(ask_of(), again_by_s=ground.now.now_s))
    await run_loop(10)
    assert waiting.done() == is_told
    assert ground.throttler.queued(KEY) == (not is_told)
    ground.throttler.check_integrity()
    if is_told:
        assert isinstance(waiting.exception(), NoSlotInTime)
    else:
        ground.feed(replica_row("b", 4))
        assert (await waiting).row.runtime_id == "b"
    ground.throttler.check_integrity()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_slot_that_comes_as_the_time_ends_is_used_or_given_back(is_cancelled: bool) -> None:
    """Granted and out of time in one step of the loop, cancelled or not: the slot is somebody's, or free."""

    ground = Ground("a")
    held = [(ask, await ground.take(ask)) for ask in (ask_of(), ask_of(), ask_of(), ask_of())]
    last = ask_of()
    waiting = asyncio.create_task(ground.take(last, again_by_s=ground.now.now_s + 60.0))
    await asyncio.sleep(0)
    ask, replica = held.pop()
    ground.release(replica, ask, 0)
    if is_cancelled:
        waiting.cancel()
        await asyncio.wait((waiting,))
    else:
        ground.release(await waiting, last, 0)
    assert replica.running == 3
    ground.throttler.check_integrity()
