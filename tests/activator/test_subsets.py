"""Activators that share many replicas each prefer some: fewer connections, as long as those have a free slot."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.affinity import Affinity
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.policy.held_quota import RENEW_S
from activator.shared_store import RedisStore, open_store
from activator.slots import Peers
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.test_rates import Clock
from tests.activator.test_throttler import KEY, Bell
from tests.activator.world import world

SLOTS = 8
ASK = Ask("default", 10, 10)
WIDE = Bound(1000, 100_000, 100_000)
MANY = "abcdefghijklmnop"
FEW = "abcdef"  # of four activators, where two share a replica: three each


class Door:
    """One activator. The replicas tell it that it may have all their slots."""

    def __init__(self, number: int, members: list[str], replicas: str, *, prefer: bool = True) -> None:
        self.clock = Clock()
        peers = Peers(f"door-{number}", lambda: tuple(members), prefer)
        limits = QueueLimits(WIDE, WIDE, WIDE, 60.0)
        draw = random.Random(number).randrange
        self.throttler = Throttler(limits, Bell(), peers=peers, clock=self.clock, draw=draw)
        self.throttler.apply(Feed(revision=1, replicas=tuple(replica_row(name, SLOTS) for name in replicas)))
        self.inside: list[Replica] = []

    @property
    def preferred(self) -> set[str]:
        return {name for name, each in self.throttler.slots.line_of(KEY).replicas.items() if each.is_preferred}

    async def come(self, many: int = 1, ask: Ask = ASK) -> set[str]:
        """So many requests, which stay inside; where they are."""
        until = Deadline(self.clock.now_s + 60.0)
        found = [await asyncio.wait_for(self.throttler.acquire(KEY, ask, until), 10) for _ in range(many)]
        for replica in found:
            self.throttler.report_began(replica, SLOTS)
        self.inside += found
        self.throttler.check_integrity()
        return {replica.row.runtime_id for replica in found}

    def leave(self, many: int) -> None:
        for replica in self.inside[:many]:
            self.throttler.slots.release(KEY, replica, ASK, 10)
        del self.inside[:many]

    async def one_by_one(self, many: int, ask: Ask = ASK) -> set[str]:
        """So many requests, each after the one before, over three seconds: where they were in the last one."""
        for _ in range(3):
            self.clock.now_s += RENEW_S
            found: set[str] = set()
            for _ in range(many):
                found |= await self.come(ask=ask)
                self.throttler.slots.release(KEY, self.inside.pop(), ASK, 10)
        return found


def doors(count: int, replicas: str, *, prefer: bool = True) -> tuple[list[Door], list[str]]:
    """So many, and the names that they know."""
    members = [f"door-{number}" for number in range(count)]
    return [Door(number, members, replicas, prefer=prefer) for number in range(count)], members


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
    one.leave(len(FEW))
    near = await one.one_by_one(3)
    assert near <= one.preferred
    assert len(one.preferred) == 3
    for name in FEW:
        one.throttler.report_began(one.throttler.slots.line_of(KEY).replicas[name], SLOTS)
    assert await one.come(len(FEW) * SLOTS) == set(FEW)
    one.leave(len(FEW) * SLOTS)
    assert await one.one_by_one(20) <= one.preferred
    assert len(one.preferred) == 3


async def test_one_that_has_many_at_once_prefers_none() -> None:
    """As many as there are replicas, for as long as it has them."""

    (one, *_), _ = doors(4, FEW)

    async def settled() -> int:
        for _ in range(3):
            one.clock.now_s += RENEW_S
            await one.come()
            one.throttler.slots.release(KEY, one.inside.pop(), ASK, 10)
        return len(one.preferred)

    await one.come(len(FEW) - 2)
    assert await settled() == 3
    await one.come(2)
    assert await settled() == len(FEW)
    one.leave(3)
    assert await settled() == 3


async def test_what_belongs_to_a_replica_goes_there() -> None:
    """Whichever activator it comes by, and whoever prefers that one."""

    every, _ = doors(4, FEW)
    for number in range(8):
        ask = Ask("default", 10, 10, affinity=Affinity(f"s{number}".encode(), True))
        found = [await door.one_by_one(2, ask) for door in every]
        assert found == [found[0]] * 4
        assert len(found[0]) == 1
    assert all(len(door.preferred) == 3 for door in every)


async def test_they_follow_who_comes_and_goes() -> None:
    """Replicas, activators: within a second. Each replica is preferred by somebody all the time."""

    every, members = doors(4, FEW)

    async def settled(many: list[Door]) -> list[int]:
        for door in many:
            await door.one_by_one(1)
        return [len(door.preferred) for door in many]

    assert await settled(every) == [3] * 4
    assert set().union(*(door.preferred for door in every)) == set(FEW)
    for door in every:
        door.throttler.apply(Feed(revision=2, replicas=tuple(map(replica_row, "gh"))))
    assert await settled(every) == [4] * 4
    assert set().union(*(door.preferred for door in every)) == {*FEW, "g", "h"}
    gone = Feed(revision=3, replicas=(replica_row("a", draining=True),), removed_replicas=("b",))
    for door in every:
        door.throttler.apply(gone)
    assert await settled(every) == [3] * 4
    del members[2:]
    assert await settled(every[:2]) == [6] * 2, "as many as share a replica"


async def _beat(store: RedisStore) -> None:
    await store.run()


@pytest.mark.parametrize(("setting", "want"), [("auto", 2), ("off", 6)])
def test_an_activator_prefers_some(tmp_path: Path, setting: str, want: int) -> None:
    """Beside three others, of six replicas with four slots: two requests at once are at two of them, and its page says
    how many it prefers.
    """
    held = Held()

    async def scenario() -> None:
        with RedisServer() as server:
            async with AsyncExitStack() as ladder:
                beats = []
                for number in range(3):
                    store = await ladder.enter_async_context(open_store(server.url, f"other-{number}", 20.0))
                    beats.append(asyncio.create_task(_beat(store)))
                    ladder.callback(beats[-1].cancel)
                here = await ladder.enter_async_context(world(tmp_path, redis=server.url, subsets=setting))
                while 'kelvin_redis_members{process="activator"} 4' not in await here.page():
                    await asyncio.sleep(0.05)
                replicas = [await here.replica(name, held, max_streams=4) for name in FEW]
                asked = [asyncio.create_task(here.post()) for _ in range(2)]
                async with asyncio.timeout(30):
                    while sum(len(replica.calls) for replica in replicas) < 2:
                        await asyncio.sleep(0.01)
                page = await here.page()
                assert f'kelvin_shared_replicas{{process="activator",preferred="yes"}} {want}' in page
                assert f'kelvin_shared_replicas{{process="activator",preferred="no"}} {6 - want}' in page
                held.release()
                assert [each.status for each in await asyncio.gather(*asked)] == [200] * 2

    asyncio.run(asyncio.wait_for(scenario(), 90))
