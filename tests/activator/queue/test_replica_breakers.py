"""Per-replica circuit breaker: after a lost request the replica gets one trial request, and an answer readmits all."""

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


class BreakerWorld(SlotWorld):
    """Replicas of four slots on a manual clock, chosen at random."""

    def __init__(self, *replicas: str) -> None:
        self.now = Clock(100.0)
        rows = (replica_row(name, 4) for name in replicas)
        super().__init__(*rows, clock=self.now, draw=random.randrange)

    async def lose(self, name: str) -> None:
        """Lose a request at this replica, and let its open time pass."""
        taken: list[tuple[QueuedRequest, Replica]] = []
        while not taken or taken[-1][1].row.runtime_id != name:
            ask = ask_of()
            taken.append((ask, await self.acquire(ask)))
        ask, replica = taken.pop()
        for other, where in taken:
            self.release(where, other, 0)
        self.throttler.report_failed(replica, "replica_lost")
        self.release(replica, ask, 0)
        assert replica.breaker is not None
        self.now.now_s += replica.breaker.remaining_s(self.now.now_s)
        replica.breaker.state(self.now.now_s)


def ask_of(prefix: int | None = None) -> QueuedRequest:
    """Return a request that differs from all others."""
    affinity = None if prefix is None else read_affinity("default", None, str(prefix).encode())
    return QueuedRequest("default", 10, 10, affinity=affinity)


@pytest.mark.parametrize("affine", [False, True])
async def test_one_request_tries_a_failed_replica(affine: bool) -> None:
    """This includes requests with affinity to it. An answer readmits all requests."""

    breaker_world = BreakerWorld("a", "b", "c", "d")
    await breaker_world.lose("a")
    taken = [(await breaker_world.acquire(ask_of(n if affine else None))).row.runtime_id for n in range(13)]
    assert taken.count("a") == 1, "one trial"
    assert sorted(taken) == sorted(["a", *"bcd" * 4]), "the other requests use all slots of the other replicas"
    waiting = await breaker_world.start_request(ask_of())
    replica = breaker_world.replica("a")
    breaker_world.throttler.report_response_started(replica, None)
    assert (await waiting).row.runtime_id == "a"
    assert replica.breaker is None


async def test_abandoned_trial_of_a_replica_makes_room() -> None:
    """A request that had a slot before the loss is not the trial."""

    breaker_world = BreakerWorld("a")
    before = ask_of()
    await breaker_world.acquire(before)
    await breaker_world.lose("a")
    first, second = ask_of(), ask_of()
    replica = await breaker_world.acquire(first)
    waiting = await breaker_world.start_request(second)
    breaker_world.release(replica, before)
    await run_loop()
    assert not waiting.done(), "the trial still runs"
    breaker_world.release(replica, first, 0)
    assert await waiting is replica


@pytest.mark.parametrize(
    ("removed", "draining", "is_refused"),
    [
        pytest.param((), False, True, id="its breaker is open"),
        pytest.param(("a",), False, False, id="it is removed: wait for a start"),
        pytest.param((), True, False, id="it drains: wait for a start"),
    ],
)
async def test_request_with_bounded_wait_is_refused(removed: tuple[str, ...], draining: bool, is_refused: bool) -> None:
    """Nothing of it is left behind. A request that waits for a start keeps waiting until it gets a slot."""

    breaker_world = BreakerWorld("a")
    replica = await breaker_world.acquire(ask := ask_of())
    breaker_world.throttler.report_failed(replica)
    breaker_world.release(replica, ask, 0)
    breaker_world.feed(*([replica_row("a", 4, draining=True)] if draining else []), removed_replicas=removed)
    waiting = asyncio.create_task(breaker_world.acquire(ask_of(), retry_by_s=breaker_world.now.now_s))
    await run_loop(10)
    assert waiting.done() == is_refused
    assert breaker_world.throttler.queue_length(KEY) == (not is_refused)
    breaker_world.throttler.check_integrity()
    if is_refused:
        assert isinstance(waiting.exception(), NoSlotInTime)
    else:
        breaker_world.feed(replica_row("b", 4))
        assert (await waiting).row.runtime_id == "b"
    breaker_world.throttler.check_integrity()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_slot_granted_at_the_timeout_is_used_or_released(is_cancelled: bool) -> None:
    """The slot is granted and the wait ends in one loop iteration, with or without a cancellation."""

    breaker_world = BreakerWorld("a")
    held = [(ask, await breaker_world.acquire(ask)) for ask in (ask_of(), ask_of(), ask_of(), ask_of())]
    last = ask_of()
    waiting = asyncio.create_task(breaker_world.acquire(last, retry_by_s=breaker_world.now.now_s + 60.0))
    await asyncio.sleep(0)
    ask, replica = held.pop()
    breaker_world.release(replica, ask, 0)
    if is_cancelled:
        waiting.cancel()
        await asyncio.wait((waiting,))
    else:
        breaker_world.release(await waiting, last, 0)
    assert replica.running == 3
    breaker_world.throttler.check_integrity()
