"""Activators that share many replicas prefer a subset each: fewer connections, while the subset has a free slot."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activator.limits.redis_store import open_store
from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.replica_subsets import REVIEW_S
from activator.queue.slot_allocator import ActivatorPeers
from activator.queue.version_queue import Replica
from activator.routing.policy.affinity import Affinity
from tests.activator.clock import Clock
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, REQUEST, SlotWorld
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.world import world
from tests.eventually import eventually

SLOTS = 8
MANY_SLOTS = "abcdefghijklmnop"
FEW = "abcdef"  # with four activators and two per replica, each prefers three


class SimulatedActivator(SlotWorld):
    """One activator. Each replica gives it a credit of all slots."""

    def __init__(self, number: int, members: list[str], replicas: str, *, prefer: bool = True) -> None:
        self.now = Clock()
        peers = ActivatorPeers(f"door-{number}", lambda: tuple(members), prefer)
        rows = (replica_row(name, SLOTS) for name in replicas)
        super().__init__(*rows, clock=self.now, draw=random.Random(number).randrange, peers=peers)
        self.inside: list[Replica] = []

    @property
    def preferred(self) -> set[str]:
        return {
            name
            for name, each in self.throttler.slot_allocator.ensure_version_queue(KEY).replicas.items()
            if each.is_preferred
        }

    async def start_requests(self, many: int = 1, ask: QueuedRequest = REQUEST) -> set[str]:
        """Start so many requests. Return the replicas that they run on."""
        found = [await asyncio.wait_for(self.acquire(ask), 10) for _ in range(many)]
        for replica in found:
            self.throttler.report_response_started(replica, SLOTS)
        self.inside += found
        self.throttler.check_integrity()
        return {replica.row.runtime_id for replica in found}

    def end_first(self, many: int) -> None:
        """End the requests that started first."""
        for replica in self.inside[:many]:
            self.release(replica, REQUEST, 10)
        del self.inside[:many]

    async def one_by_one(self, many: int, ask: QueuedRequest = REQUEST) -> set[str]:
        """Send so many requests one by one, in each of three seconds. Return the replicas used in the last second."""
        for _ in range(3):
            self.now.now_s += REVIEW_S
            found: set[str] = set()
            for _ in range(many):
                found |= await self.start_requests(ask=ask)
                self.release(self.inside.pop(), REQUEST, 10)
        return found


def activators_at(count: int, replicas: str, *, prefer: bool = True) -> tuple[list[SimulatedActivator], list[str]]:
    """Return so many activators, and the list of names that they know."""
    members = [f"door-{number}" for number in range(count)]
    return [SimulatedActivator(number, members, replicas, prefer=prefer) for number in range(count)], members


@pytest.mark.parametrize(
    "prefer", [pytest.param(True, id="with subsets"), pytest.param(False, id="control: without subsets")]
)
async def test_replicas_have_fewer_connections(prefer: bool) -> None:
    """Seven activators send one request at a time, 60 per second. Of 16 replicas each prefers four."""

    every, _ = activators_at(8, MANY_SLOTS, prefer=prefer)
    found = [await door.one_by_one(60) for door in every[:-1]]
    if prefer:
        assert sum(map(len, found)) <= 4 * 7
    else:
        assert sum(map(len, found)) > 8 * 7


async def test_nobody_waits_while_there_is_a_slot_elsewhere() -> None:
    """When the preferred replicas are full it uses all others. Once they are free it uses only them again."""

    (one, *_), _ = activators_at(4, FEW)
    await one.start_requests(len(FEW))  # each replica has reported its credit by now
    one.end_first(len(FEW))
    near = await one.one_by_one(3)
    assert near <= one.preferred
    assert len(one.preferred) == 3
    for name in FEW:
        one.throttler.report_response_started(one.replica(name), SLOTS)
    assert await one.start_requests(len(FEW) * SLOTS) == set(FEW)
    one.end_first(len(FEW) * SLOTS)
    assert await one.one_by_one(20) <= one.preferred
    assert len(one.preferred) == 3


async def test_busy_activator_prefers_no_subset() -> None:
    """With as many concurrent requests as replicas it prefers all, while that lasts."""

    (one, *_), _ = activators_at(4, FEW)

    async def settled() -> int:
        for _ in range(3):
            one.now.now_s += REVIEW_S
            await one.start_requests()
            one.release(one.inside.pop(), REQUEST, 10)
        return len(one.preferred)

    await one.start_requests(len(FEW) - 2)
    assert await settled() == 3
    await one.start_requests(2)
    assert await settled() == len(FEW)
    one.end_first(3)
    assert await settled() == 3


async def test_affinity_overrides_the_preferred_subset() -> None:
    """The same replica is used by every activator, whichever prefers it."""

    every, _ = activators_at(4, FEW)
    for number in range(8):
        ask = QueuedRequest("default", 10, 10, affinity=Affinity(f"s{number}".encode(), True))
        found = [await door.one_by_one(2, ask) for door in every]
        assert found == [found[0]] * 4
        assert len(found[0]) == 1
    assert all(len(door.preferred) == 3 for door in every)


async def test_subsets_follow_activators_and_replicas() -> None:
    """Subsets follow a change within a second. Each replica is always preferred by some activator."""

    every, members = activators_at(4, FEW)

    async def settled(many: list[SimulatedActivator]) -> list[int]:
        for door in many:
            await door.one_by_one(1)
        return [len(door.preferred) for door in many]

    assert await settled(every) == [3] * 4
    assert set().union(*(door.preferred for door in every)) == set(FEW)
    for door in every:
        door.feed(*map(replica_row, "gh"))
    assert await settled(every) == [4] * 4
    assert set().union(*(door.preferred for door in every)) == {*FEW, "g", "h"}
    for door in every:
        door.feed(replica_row("a", draining=True), removed_replicas=("b",))
    assert await settled(every) == [3] * 4
    del members[2:]
    assert await settled(every[:2]) == [6] * 2, "as many as share a replica"


@pytest.mark.parametrize(("setting", "want"), [("auto", 2), ("off", 6)])
async def test_an_activator_prefers_some(tmp_path: Path, redis: RedisServer, setting: str, want: int) -> None:
    """Three other activators and six replicas with four slots: two concurrent requests run at two replicas. The metric
    has the number of preferred replicas.
    """
    held = Held()

    async with AsyncExitStack() as stack:
        for number in range(3):
            store = await stack.enter_async_context(open_store(redis.url, f"other-{number}", 20.0))
            stack.callback(asyncio.ensure_future(store.run()).cancel)
        here = await stack.enter_async_context(world(tmp_path, redis=redis.url, subsets=setting))
        await here.wait_for_metric("kelvin_redis_members", 4)
        replicas = [await here.replica(name, held, max_streams=4) for name in FEW]
        requests = [asyncio.create_task(here.post()) for _ in range(2)]
        await eventually(lambda: sum(len(replica.calls) for replica in replicas) == 2)
        assert await here.metric_value("kelvin_shared_replicas", preferred="yes") == want
        assert await here.metric_value("kelvin_shared_replicas", preferred="no") == 6 - want
        held.release()
        assert [each.status for each in await asyncio.gather(*requests)] == [200] * 2
