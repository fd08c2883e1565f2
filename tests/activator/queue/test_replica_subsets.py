"""Activators that share many replicas each prefer some: fewer connections, as long as those have a free slot."""

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
from tests.activator.queue.slot_world import ASK, KEY, SlotWorld
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.world import world
from tests.eventually import eventually

SLOTS = 8
MANY = "abcdefghijklmnop"
FEW = "abcdef"  # of four activators, where two share a replica: three each


class SimulatedActivator(SlotWorld):
    """One activator. The replicas tell it that it may have all their slots."""

    def __init__(self, number: int, members: list[str], replicas: str, *, prefer: bool = True) -> None:
        self.now = Clock()
        peers = ActivatorPeers(f"door-{number}", lambda: tuple(members), prefer)
        rows = (replica_row(name, SLOTS) for name in replicas)
        super().__init__(*rows, clock=self.now, draw=random.Random(number).randrange, peers=peers)
        self.inside: list[Replica] = []

    @property
    def preferred(self) -> set[str]:
        return {
            name for name, each in self.throttler.slots.ensure_version_queue(KEY).replicas.items() if each.is_preferred
        }

    async def come(self, many: int = 1, ask: QueuedRequest = ASK) -> set[str]:
        """So many requests, which stay inside; where they are."""
        found = [await asyncio.wait_for(self.take(ask), 10) for _ in range(many)]
        for replica in found:
            self.throttler.report_began(replica, SLOTS)
        self.inside += found
        self.throttler.check_integrity()
        return {replica.row.runtime_id for replica in found}

    def end_first(self, many: int) -> None:
        """Of those inside, so many that came first have ended."""
        for replica in self.inside[:many]:
            self.release(replica, ASK, 10)
        del self.inside[:many]

    async def one_by_one(self, many: int, ask: QueuedRequest = ASK) -> set[str]:
        """So many requests, each after the one before, over three seconds: where they were in the last one."""
        for _ in range(3):
            self.now.now_s += REVIEW_S
            found: set[str] = set()
            for _ in range(many):
                found |= await self.come(ask=ask)
                self.release(self.inside.pop(), ASK, 10)
        return found


def doors(count: int, replicas: str, *, prefer: bool = True) -> tuple[list[SimulatedActivator], list[str]]:
    """So many, and the names that they know."""
    members = [f"door-{number}" for number in range(count)]
    return [SimulatedActivator(number, members, replicas, prefer=prefer) for number in range(count)], members


@pytest.mark.parametrize("prefer", [pytest.param(True, id="with"), pytest.param(False, id="without: the control")])
async def test_replicas_have_fewer_connections(prefer: bool) -> None:
    """Seven activators that have one request at a time, 60 in each second: of 16 replicas they prefer four each."""

    every, _ = doors(8, MANY, prefer=prefer)
    found = [await door.one_by_one(60) for door in every[:-1]]
    if prefer:
        assert sum(map(len, found)) <= 4 * 7
    else:
        assert sum(map(len, found)) > 8 * 7


async def test_nobody_waits_while_there_is_a_slot_elsewhere() -> None:
    """Those that it prefers are full: it has all of the others, and once they are free again, keeps to them."""

    (one, *_), _ = doors(4, FEW)
    await one.come(len(FEW))  # each has told by now how many it takes
    one.end_first(len(FEW))
    near = await one.one_by_one(3)
    assert near <= one.preferred
    assert len(one.preferred) == 3
    for name in FEW:
        one.throttler.report_began(one.replica(name), SLOTS)
    assert await one.come(len(FEW) * SLOTS) == set(FEW)
    one.end_first(len(FEW) * SLOTS)
    assert await one.one_by_one(20) <= one.preferred
    assert len(one.preferred) == 3


async def test_busy_activator_prefers_no_subset() -> None:
    """As many as there are replicas, for as long as it has them."""

    (one, *_), _ = doors(4, FEW)

    async def settled() -> int:
        for _ in range(3):
            one.now.now_s += REVIEW_S
            await one.come()
            one.release(one.inside.pop(), ASK, 10)
        return len(one.preferred)

    await one.come(len(FEW) - 2)
    assert await settled() == 3
    await one.come(2)
    assert await settled() == len(FEW)
    one.end_first(3)
    assert await settled() == 3


async def test_affinity_overrides_the_preferred_subset() -> None:
    """Whichever activator it comes by, and whoever prefers that one."""

    every, _ = doors(4, FEW)
    for number in range(8):
        ask = QueuedRequest("default", 10, 10, affinity=Affinity(f"s{number}".encode(), True))
        found = [await door.one_by_one(2, ask) for door in every]
        assert found == [found[0]] * 4
        assert len(found[0]) == 1
    assert all(len(door.preferred) == 3 for door in every)


async def test_subsets_follow_activators_and_replicas() -> None:
    """Replicas, activators: within a second. Each replica is preferred by somebody all the time."""

    every, members = doors(4, FEW)

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
    """Beside three others, of six replicas with four slots: two requests at once are at two of them, and its page says
    how many it prefers.
    """
    held = Held()

    async with AsyncExitStack() as stack:
        for number in range(3):
            store = await stack.enter_async_context(open_store(redis.url, f"other-{number}", 20.0))
            stack.callback(asyncio.ensure_future(store.run()).cancel)
        here = await stack.enter_async_context(world(tmp_path, redis=redis.url, subsets=setting))
        await here.wait_for_metric("kelvin_redis_members", 4)
        replicas = [await here.replica(name, held, max_streams=4) for name in FEW]
        asked = [asyncio.create_task(here.post()) for _ in range(2)]
        await eventually(lambda: sum(len(replica.calls) for replica in replicas) == 2)
        assert await here.metric_value("kelvin_shared_replicas", preferred="yes") == want
        assert await here.metric_value("kelvin_shared_replicas", preferred="no") == 6 - want
        held.release()
        assert [each.status for each in await asyncio.gather(*asked)] == [200] * 2
