"""Requests that belong together meet at one replica, whichever activator they came by: it asks for a slot of it."""

import asyncio
from typing import Any

import pytest

from activator.line import Line, Replica
from activator.policy.affinity import Affinity
from activator.policy.ask import Ask
from activator.policy.places import QUIET_S, RENEW_S
from activator.shared_slots import SharedSlots
from activator.throttler import Throttler
from contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.leasing import SLOTS, Door, doors
from tests.activator.redis_server import RedisServer
from tests.activator.test_rates import Clock
from tests.activator.test_throttler import KEY, LIMITS, Bell, _feed

NAMES = "abcd"


def of(key: str, *, is_session: bool = True) -> Ask:
    """A request of a session, or one with a beginning."""
    return Ask("default", 10, 10, affinity=Affinity(key.encode(), is_session))


def line(door: Door) -> Line:
    return door.throttler.line_of(KEY)


def home(door: Door, ask: Ask) -> str:
    """The replica that the ring prefers for it."""
    assert ask.affinity is not None
    return next(line(door).ring.from_key(ask.affinity.key))


async def never(self: SharedSlots, *_: object) -> None:
    """Nothing is asked for."""


@pytest.mark.parametrize("is_session", [pytest.param(True, id="sessions"), pytest.param(False, id="beginnings")])
@pytest.mark.parametrize("asks", [pytest.param(True, id="asks"), pytest.param(False, id="does not: the control")])
def test_they_meet(is_session: bool, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another at either door, some of them after what was leased there has gone back."""
    if not asks:
        monkeypatch.setattr(SharedSlots, "fetch", never)

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, replicas=NAMES) as both:
                astray = 0
                for number in range(24):
                    door, ask = both[number % 2], of(f"s{number // 2 % 6}", is_session=is_session)
                    await door.come(ask=ask)
                    await door.heard()
                    astray += door.at != [home(door, ask)]
                    door.leave()
                    for each in both:
                        await each.pass_s(RENEW_S / 3)
                assert (astray == 0) == asks

    asyncio.run(scenario())


def test_a_slot_that_is_here_asks_nobody() -> None:
    """One request after another of a session asks as often as any others: with the first, and to renew."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, replicas=NAMES) as (one, _):
                before = one.store.commands
                for _ in range(50):
                    await one.come(ask=of("s"))
                    await one.heard()
                    one.leave()
                assert one.store.commands - before == 1

    asyncio.run(scenario())


def test_it_goes_elsewhere_where_others_have_them_all() -> None:
    """After one question, and those that come within a moment of it after none."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, replicas=NAMES) as (one, two):
                ask = of("s")
                await two.come(SLOTS, ask)
                await two.heard()
                assert set(two.at) == {home(two, ask)}
                await one.come(ask=of("other"))
                await one.heard()
                before = one.store.commands
                for _ in range(3):
                    await one.come(ask=ask)
                    await one.heard()
                assert home(one, ask) not in one.at
                assert one.inside == 4
                asked = one.store.commands - before
                two.leave(SLOTS)
                for door in (two, one, two):
                    await door.pass_s(max(QUIET_S, RENEW_S))
                await one.come(ask=ask)
                await one.heard()
                assert one.at[-1] == home(one, ask)
                assert asked <= 2, "one for it, and one for slots of the others"

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_redis_that_is_away_holds_nobody_up(fault: str) -> None:
    """For longer than an answer may take: it is served where there is a slot, and the next one asks nobody."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with doors(server, server, replicas=NAMES, answer_s=0.5) as (one, _):
                first = of("first")
                await one.come(ask=first)
                await one.heard()
                await one.pass_s(RENEW_S)
                await one.pass_s(RENEW_S)
                ask = next(ask for ask in map(of, "xyzuvw") if home(one, ask) != home(one, first))
                server.kill() if fault == "killed" else server.pause()
                await one.come(ask=ask)
                await one.heard()
                assert one.at == [home(one, first)] * 2
                commands = one.store.commands
                await one.pass_s(RENEW_S)
                one.leave()
                await one.come(ask=ask)
                assert one.store.commands == commands
                assert one.at[-1] == home(one, ask), "of a share"
                if fault == "paused":
                    server.resume()

    asyncio.run(scenario())


class Gate:
    """A store whose answers come when the test says so: as much as is wanted."""

    def __init__(self) -> None:
        self.is_up, self.members, self.name, self.names = True, 2, "me", ("me", "other")
        self.asked: list[tuple[set[str], asyncio.Future[None]]] = []  # replicas of which any is wanted

    async def ask(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """See `shared_slots.Store`."""
        rows = [arguments[at : at + 5] for at in range(3, len(arguments), 5)]
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(({str(row[0]) for row in rows if row[3]}, answer))
        await answer
        return [int(row[3]) + int(row[4]) for row in rows]


class Behind:
    """An activator that asks there."""

    def __init__(self, replicas: str = NAMES) -> None:
        self.gate = Gate()
        self.slots = SharedSlots(self.gate, Clock())
        self.throttler = Throttler(LIMITS, Bell(), slots=self.slots)
        self.throttler.apply(_feed(*map(replica_row, replicas)))
        ring = self.throttler.line_of(KEY).ring
        self.asks = {next(ring.from_key(f"s{number}".encode())): of(f"s{number}") for number in range(50)}  # by home

    def come(self, name: str) -> asyncio.Task[Replica]:
        """A request that belongs there."""
        until = Deadline.after(60.0, asyncio.get_running_loop().time())
        return asyncio.create_task(self.throttler.acquire(KEY, self.asks[name], until))

    async def answered(self, number: int) -> set[str]:
        """What was wanted by that question, which is answered now."""
        wanted, answer = self.gate.asked[number]
        answer.set_result(None)
        await turns()
        return wanted

    def called(self) -> int:
        """Requests that wait for an answer."""
        return sum(each.lease.called for each in self.throttler.line_of(KEY).replicas.values() if each.lease)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_it_waits_for_two_answers_at_most() -> None:
    """The one that is under way, and its own; that others go on asking is not waited for."""

    async def scenario() -> None:
        here = Behind()
        first = here.come("a")
        await turns()
        second, third = here.come("b"), here.come("c")
        await turns()
        assert await here.answered(0) == {"a"}
        assert first.result().row.runtime_id == "a"
        fourth = here.come("d")
        await turns()
        assert await here.answered(1) >= {"b", "c"}
        assert here.slots.is_asking
        assert [each.result().row.runtime_id for each in (second, third)] == ["b", "c"]
        assert "d" in await here.answered(2)
        assert fourth.result().row.runtime_id == "d"
        assert (here.called(), here.slots.is_asking) == (0, False)

    asyncio.run(scenario())


def test_who_is_cancelled_asks_for_nothing() -> None:
    """Its question has not gone out yet, as another one is under way, and then never does."""

    async def scenario() -> None:
        here = Behind()
        first = here.come("a")
        await turns()
        second = here.come("b")
        await turns()
        assert here.called() == 2
        second.cancel()
        await turns()
        assert here.called() == 1
        await here.answered(0)
        assert len(here.gate.asked) == 1
        assert first.result().row.runtime_id == "a"
        here.throttler.check_integrity()
        assert (here.called(), here.slots.is_asking) == (0, False)

    asyncio.run(scenario())


def test_its_replica_goes_while_it_asks() -> None:
    """And there is no other: it waits for a start, as anybody does."""

    async def scenario() -> None:
        here = Behind("a")
        one = here.come("a")
        await turns()
        here.throttler.apply(_feed(removed=("a",)))
        await here.answered(0)
        assert (here.called(), here.throttler.queued(KEY), one.done()) == (0, 1, False)
        one.cancel()
        await turns()
        assert here.throttler.queued(KEY) == 0

    asyncio.run(scenario())


def test_not_past_those_who_wait() -> None:
    """Who comes behind them waits in line, wherever it belongs."""

    async def scenario() -> None:
        here = Behind("a")
        here.gate.is_up = False
        first = asyncio.create_task(
            here.throttler.acquire(KEY, Ask("default", 10, 10), Deadline.after(60.0, asyncio.get_running_loop().time()))
        )
        await turns()
        second = here.come("a")
        await turns()
        assert (here.called(), here.throttler.queued(KEY)) == (0, 2)
        for each in (first, second):
            each.cancel()
        await turns()

    asyncio.run(scenario())
