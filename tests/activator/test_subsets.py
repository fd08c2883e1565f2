"""Activators that share many replicas each prefer some: fewer rows and connections, and slots for who needs them."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activator.policy.affinity import Affinity
from activator.policy.ask import Ask
from activator.policy.places import GOOD_S, QUIET_S, RENEW_S
from activator.shared_store import open_store
from contracts.control import Feed
from tests.activator.control import replica_row
from tests.activator.leasing import ASK, HASH, SLOTS, Door, beating, doors
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.world import world

MANY = "abcdefghijklmnop"
FEW = "abcdef"  # of four activators, where two share a replica: three each


async def one_by_one(door: Door, many: int, ask: Ask = ASK) -> set[str]:
    """So many requests, each after the one before: where they were."""
    found = set()
    for _ in range(many):
        await door.come(ask=ask)
        await door.heard()
        found |= set(door.at)
        door.leave()
    return found


@pytest.mark.parametrize("subsets", [pytest.param(True, id="with"), pytest.param(False, id="without: the control")])
def test_what_they_are_for(subsets: bool) -> None:
    """Seven activators that had many requests at once, and by now have one at a time, 60 in each second; and one that
    has many. Of 16 replicas of 8 slots the seven prefer four each: so the replicas have fewer connections, Redis has
    fewer rows, and the one has most slots. They ask as often as without.
    """

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 8, replicas=MANY, is_random=True, subsets=subsets) as every:
                little, much = every[:-1], every[-1]
                for door in little:
                    await door.come(len(MANY))
                while any(door.waiting for door in little):  # the limit is that of `doors`
                    for door in little:
                        await door.pass_s(RENEW_S)
                for door in little:
                    door.leave(len(MANY))
                await much.come(200)
                for _ in range(4):
                    found = [await one_by_one(door, 60) for door in little]
                    before = sum(door.store.commands for door in little)
                    for door in every:
                        await door.pass_s(RENEW_S)
                    asked = sum(door.store.commands for door in little) - before
                await much.pass_s(QUIET_S)
                connections = sum(map(len, found))
                rows = int(server.ask("HLEN", HASH)[1:])
                assert asked == len(little)
                if subsets:
                    assert connections <= 4 * len(little)
                    assert rows <= 4 * len(little) + len(MANY)
                    assert much.inside >= len(MANY) * SLOTS - 4 * len(little)
                else:
                    assert connections > 8 * len(little)
                    assert rows > 8 * len(little) + len(MANY)
                    assert much.inside < len(MANY) * SLOTS - 8 * len(little)

    asyncio.run(scenario())


def test_nobody_waits_while_there_is_a_slot_elsewhere() -> None:
    """Those that it prefers are full: it has all of the others, and once they are free again, keeps to them."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas=FEW, is_random=True) as (one, *_):
                await one_by_one(one, 3)
                near = one.preferred
                assert len(near) == 3
                await one.come(len(FEW) * SLOTS)
                await one.heard()
                assert (one.inside, one.waiting) == (len(FEW) * SLOTS, 0)
                one.leave(len(FEW) * SLOTS)
                for _ in range(3):
                    await one.pass_s(RENEW_S)
                assert await one_by_one(one, 20) <= near
                await one.pass_s(RENEW_S)
                await one.pass_s(RENEW_S)
                assert server.ask("KEYS", "*slots").startswith(b"*0"), "nothing is left of the others"

    asyncio.run(scenario())


def test_one_that_has_many_at_once_prefers_none() -> None:
    """As many as there are replicas, for as long as it has them."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas=FEW, is_random=True) as (one, *_):
                await one.come(len(FEW) - 1)
                for _ in range(3):
                    await one.heard()
                    await one.pass_s(RENEW_S)
                assert len(one.preferred) == 3
                await one.come()
                for _ in range(3):
                    await one.heard()
                    await one.pass_s(RENEW_S)
                assert len(one.preferred) == len(FEW)
                one.leave(2)
                for _ in range(3):
                    await one.pass_s(RENEW_S)
                assert len(one.preferred) == 3

    asyncio.run(scenario())


def test_what_belongs_to_a_replica_goes_there() -> None:
    """Whichever activator it comes by, and whoever prefers that one."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas=FEW, is_random=True) as every:
                for number in range(8):
                    ask = Ask("default", 10, 10, affinity=Affinity(f"s{number}".encode(), True))
                    found = [await one_by_one(door, 2, ask) for door in every]
                    assert found == [found[0]] * 4
                    assert len(found[0]) == 1
                    for door in every:
                        await door.pass_s(RENEW_S)
                assert all(len(door.preferred) == 3 for door in every)

    asyncio.run(scenario())


def test_they_follow_who_comes_and_goes() -> None:
    """Replicas, activators: within a second. Each replica is preferred by somebody all the time."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas=FEW, is_random=True) as every:

                async def settled(many: list[Door]) -> list[int]:
                    for door in many:
                        await one_by_one(door, 1)
                        await door.pass_s(RENEW_S)
                        await one_by_one(door, 1)
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
                server.ask("ZREM", "kelvin:members", "door-2", "door-3")
                for door in every[:2]:
                    await door.store.beat()
                assert await settled(every[:2]) == [6] * 2, "as many as share a replica"

    asyncio.run(scenario())


def test_without_redis() -> None:
    """It goes on preferring them, of its share, and where that is taken goes to the others."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas=FEW, is_random=True) as (one, *_):
                await one_by_one(one, 1)
                near = one.preferred
                server.kill()
                await one.pass_s(RENEW_S)
                await one.pass_s(GOOD_S)
                assert not one.store.is_up
                assert await one_by_one(one, 10) <= near
                await one.come(len(FEW) * SLOTS // 4)
                assert one.waiting == 0
                assert set(one.at) == set(FEW)

    asyncio.run(scenario())


@pytest.mark.parametrize(("setting", "want"), [("auto", 2), ("off", 6)])
def test_an_activator_prefers_some(tmp_path: Path, setting: str, want: int) -> None:
    """Beside three others, of six replicas with four slots: five requests at once are at two of them, or at more where
    its setting says so.
    """
    held = Held()

    async def scenario() -> None:
        with RedisServer() as server:
            async with AsyncExitStack() as ladder:
                for number in range(3):
                    store = await ladder.enter_async_context(open_store(server.url, f"other-{number}", 20.0))
                    await ladder.enter_async_context(beating(store))
                here = await ladder.enter_async_context(world(tmp_path, redis=server.url, subsets=setting))
                while 'kelvin_redis_members{process="activator"} 4' not in await here.page():
                    await asyncio.sleep(0.05)
                replicas = [await here.replica(name, held, max_streams=4) for name in FEW]
                asked = [asyncio.create_task(here.post()) for _ in range(5)]
                async with asyncio.timeout(30):
                    while sum(len(replica.calls) for replica in replicas) < 5:
                        await asyncio.sleep(0.01)
                used = sum(len(replica.calls) > 0 for replica in replicas)
                assert (used <= 2) == (setting == "auto")
                page = await here.page()
                assert f'kelvin_shared_replicas{{process="activator",preferred="yes"}} {want}' in page
                assert f'kelvin_shared_replicas{{process="activator",preferred="no"}} {6 - want}' in page
                held.release()
                assert [each.status for each in await asyncio.gather(*asked)] == [200] * 5

    asyncio.run(asyncio.wait_for(scenario(), 90))
