"""A replica's slots over several activators and one real Redis: never more than it has, and to each its part."""

import asyncio
import random
from pathlib import Path

import pytest

from activator.policy.places import GOOD_S, QUIET_S, RENEW_S
from activator.policy.slot_parts import Wish, part_of
from activator.shared_store import open_store
from activator.slot_script import LEASE
from tests.activator.leasing import HASH, SLOTS, Door, beating, doors
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.world import world


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="two: the control")])
@pytest.mark.parametrize("seed", range(4))
def test_together_never_more_than_the_replica_has(shared: bool, seed: int) -> None:
    """Whoever comes, waits, leaves, renews, in whatever order, and while answers are on their way."""

    async def scenario() -> None:
        draw = random.Random(seed)
        with RedisServer() as server, RedisServer() as other:
            async with doors(server, server if shared else other) as both:
                most = 0
                for step in range(120):
                    door = draw.choice(both)
                    await door.come(draw.randrange(4))
                    door.leave(draw.randrange(4))
                    door.clock.now_s += draw.choice((0.0, QUIET_S, RENEW_S))
                    await door.slots.tend()
                    if draw.random() < 0.5 or step > 100:
                        await door.heard()
                    most = max(most, sum(each.inside for each in both))
                for _ in range(4):
                    for door in both:
                        await door.come(SLOTS)
                        await door.pass_s(RENEW_S)
                        most = max(most, sum(each.inside for each in both))
                assert (most <= SLOTS) == shared
                assert most >= SLOTS

    asyncio.run(scenario())


def test_what_one_does_not_use_is_the_others() -> None:
    """All of it; and once that one has requests, too, each has half, as requests end. None ends for it."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server) as (one, two):
                await one.come(3 * SLOTS)
                await one.heard()
                assert (one.inside, one.waiting) == (SLOTS, 2 * SLOTS)
                await two.come(2 * SLOTS)
                await two.heard()
                assert two.inside == 0
                for _ in range(6 * SLOTS):
                    assert one.inside + two.inside <= SLOTS
                    one.leave()
                    for door in (one, two, one, two):
                        await door.pass_s(QUIET_S)
                    if two.inside == SLOTS // 2:
                        break
                assert (one.inside, two.inside) == (SLOTS // 2, SLOTS // 2)
                while one.inside < SLOTS:
                    two.leave(SLOTS)
                    for door in (two, one):
                        await door.pass_s(RENEW_S)
                        assert one.inside + two.inside <= SLOTS
                assert two.inside + two.waiting == 0

    asyncio.run(scenario())


def test_one_slot_goes_round() -> None:
    """Both always have somebody who waits: neither is let in alone for ever."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, slots=1, turn_s=0.05) as both:
                served = [0, 0]
                for door in both:
                    await door.come(200)
                while min(served) < 3:
                    for number, door in enumerate(both):
                        await door.pass_s(RENEW_S)
                        assert sum(each.inside for each in both) <= 1
                        served[number] += door.inside
                        door.leave(door.inside)
                        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_in_each_turn_each_has_one_somewhere() -> None:
    """Of two replicas that take one request: neither has both, and the other none, until the next turn."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, slots=1, turn_s=1e6, replicas="ab") as both:
                for door in both:
                    await door.come(50)
                rounds = []
                for _ in range(8):
                    for door in both:
                        await door.pass_s(RENEW_S)
                    rounds.append([door.inside for door in both])
                    for door in both:
                        door.leave(door.inside)
                assert rounds[-3:] == [[1, 1]] * 3, rounds

    asyncio.run(scenario())


def test_what_others_have_ahead_is_whose_who_needs_it() -> None:
    """Three have a few requests inside, and would like some ahead: all that is left is the fourth's, who has many."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(*[server] * 4, replicas="abcd") as every:
                many = every[3]
                for door in every[:3]:
                    await door.come(4)
                    await door.heard()
                await many.come(60)
                for _ in range(4):
                    for door in every:
                        await door.pass_s(RENEW_S)
                assert [door.inside for door in every] == [4, 4, 4, 4 * SLOTS - 12]
                assert many.waiting > 0

    asyncio.run(scenario())


def test_few_requests_ask() -> None:
    """One after another: the first, and the renewals; who waits while there is no more to be had, once in a while."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server) as (one, two):
                before = one.store.commands
                for _ in range(300):
                    await one.come()
                    await one.heard()
                    one.leave()
                assert one.store.commands - before == 1
                await one.pass_s(RENEW_S)
                assert one.store.commands - before == 2
                await two.come(SLOTS)
                await one.come(SLOTS)
                for door in (one, two):
                    await door.heard()
                before = one.store.commands
                for _ in range(300):
                    await one.come()
                    await one.heard()
                assert one.store.commands - before <= 1

    asyncio.run(scenario())


def test_nobody_else_is_asked_of() -> None:
    """An activator alone has all slots, and asks nobody; once another one came it leases them; and back."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server) as (one,):
                before = one.store.commands
                await one.come(SLOTS + 1)
                assert (one.inside, one.waiting) == (SLOTS, 1)
                await one.pass_s(RENEW_S)
                assert one.store.commands == before
                one.store.members = 2
                await one.pass_s(RENEW_S)
                assert one.store.commands == before + 1
                assert (one.inside, one.waiting) == (SLOTS, 1), "who is inside stays"
                one.leave(4)
                await one.heard()
                one.store.members = 1
                await one.pass_s(RENEW_S)
                await one.come(SLOTS)
                assert one.inside == SLOTS

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_without_redis(fault: str) -> None:
    """What is leased until its time is over, then a share; nobody waits for it. When it is back each keeps what it has,
    and together they have no more than there are.
    """

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, answer_s=2.0) as (one, two):
                await one.come(2)
                await one.heard()
                server.kill() if fault == "killed" else server.pause()
                await one.come(SLOTS)
                await one.pass_s(RENEW_S)
                assert not one.store.is_up
                assert one.inside == 3, "two, and one that was leased ahead"
                commands = one.store.commands
                await one.pass_s(GOOD_S)
                await two.come(SLOTS)
                await two.pass_s(RENEW_S)
                await two.pass_s(GOOD_S)
                assert (one.inside, two.inside) == (SLOTS // 2, SLOTS // 2)
                assert one.store.commands == commands
                server.start() if fault == "killed" else server.resume()
                for door in (one, two):
                    while not is_up(door):
                        await door.store.beat()
                while one.store.members < 2:  # a new one has yet to hear of the other
                    await one.store.beat()
                for _ in range(3):
                    for door in (one, two):
                        await door.pass_s(RENEW_S)
                        assert one.inside + two.inside == SLOTS

    asyncio.run(scenario())


def is_up(door: Door) -> bool:
    return bool(getattr(door.store, "is_up"))  # noqa: B009 - mypy would take it for unchanged


def test_who_is_silent_loses_its_slots() -> None:
    """After its time; who ends gives them back at once."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, leased_s=0.5) as (one, two):
                await one.come(SLOTS)
                await one.heard()
                await two.come(SLOTS)
                while two.inside < SLOTS:
                    await two.pass_s(RENEW_S)
                for door in (one, two):
                    door.leave(SLOTS)
            assert server.ask("KEYS", "*slots").startswith(b"*0")

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_the_script_divides_as_the_policy_says(seed: int) -> None:
    """Whatever members want, in whichever turn."""

    async def scenario() -> None:
        draw = random.Random(seed)
        with RedisServer() as server:
            async with asyncio.timeout(60), open_store(server.url, "one", 20.0) as store:
                for number in range(60):
                    slots, needs = draw.randrange(12), [draw.randrange(9) for _ in range(draw.randint(1, 5))]
                    rows = [(need, draw.randrange(4) if need else 0) for need in needs]
                    key, far_s = f"k-{number}", "1e12"  # all of it in one turn, of which there was none before
                    for me, row in enumerate(rows):
                        await store.ask(LEASE, (key,), f"m-{me}", "60", far_s, "a", 0, 0, *row)
                    told = [
                        await store.ask(LEASE, (key,), f"m-{me}", "60", far_s, "a", slots, 0, *row)
                        for me, row in enumerate(rows)
                    ]
                    at = [me for me, row in enumerate(rows) if row[0]]  # who wants none is not there
                    some = [Wish(0, rows[me][0], sum(rows[me])) for me in at]
                    parts = dict(zip(at, (part_of(slots, some, me, ord("a")) for me in range(len(some))), strict=True))
                    assert told == [[parts.get(me, 0)] for me in range(len(rows))], (slots, rows)

    asyncio.run(scenario())


def test_an_activator_leases_its_slots(tmp_path: Path) -> None:
    """Named by its setting: while another one has all slots of the replica its request waits, then it is served; and it
    ends in peace.
    """
    held = Held()

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, slots=2) as (other,):
                other.store.members = 2
                await other.come(2)
                await other.pass_s(RENEW_S)
                assert other.inside == 2
                async with beating(other.store), world(tmp_path, redis=server.url) as here:
                    replica = await here.replica("a", held, max_streams=2)
                    asked = asyncio.create_task(here.post())
                    async with asyncio.timeout(30):
                        while b"activator-" not in server.ask("HGETALL", HASH):
                            await other.pass_s(RENEW_S)
                            await asyncio.sleep(0.05)
                    assert len(replica.calls) == 0
                    other.leave()
                    async with asyncio.timeout(30):
                        while not replica.calls:
                            await other.pass_s(RENEW_S)
                            await asyncio.sleep(0.05)
                    held.release()
                    assert (await asked).status == 200
                    assert await here.terminate() == 0
                    assert b"activator-" not in server.ask("HGETALL", HASH)

    asyncio.run(scenario())
