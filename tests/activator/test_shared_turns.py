"""Two activators' queues are fair together: over a store in this process and over a real Redis, the same claims.

The bound: two tenants that wait are never further apart than two of the largest requests, and twice what the other one
gave since it was heard of: here ten requests of it, as many that it had not told then, and a few while answers come.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.policy.ask import Ask
from activator.policy.bounds import UNBOUNDED
from activator.policy.crowd import Crowd
from activator.policy.fair import FairQueue
from activator.policy.turns import EVERY, LULL_S, PAUSE_S, SharedCounters
from activator.shared_store import RedisStore, open_store
from activator.shared_turns import Store
from tests.activator.redis_server import RedisServer
from tests.activator.test_rates import Clock
from tests.activator.turning import LARGEST, InProcess, Run, Side
from tests.virtual_loop import run_virtually

ON_THEIR_WAY = 10  # requests; answers come after two on the average
BOUND = 2 * LARGEST * (1 + 2 * EVERY + ON_THEIR_WAY)

Stores = Callable[[int], Awaitable[list[Store]]]  # for so many sides
Scenario = Callable[[Stores], Awaitable[None]]
Runner = Callable[[Scenario], None]


async def in_process(sides: int) -> list[Store]:
    return [InProcess()] * sides


@pytest.fixture(params=["in process", "over Redis"])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs a scenario with either."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer()) if request.param == "over Redis" else None

        async def started(scenario: Scenario) -> None:
            async with asyncio.timeout(120), AsyncExitStack() as opened:

                async def over_redis(sides: int) -> list[Store]:
                    assert server is not None
                    server.ask("FLUSHALL")
                    names = [f"{number}" for number in range(sides)]
                    stores = [await opened.enter_async_context(open_store(server.url, name, 20.0)) for name in names]
                    for store in stores:
                        await store.beat()
                    return list(stores)

                await scenario(in_process if server is None else over_redis)

        yield lambda scenario: asyncio.run(started(scenario))


async def one_everywhere(stores: list[Store], seed: int, requests: int = 600) -> Run:
    """`t` waits at both, `u` at the first alone: who counts for itself gives `t` three times as much."""
    draw, clock = random.Random(seed), Clock()
    found = Run([Side(store, clock) for store in stores], clock, draw)
    for _ in range(requests):
        await found.step(["tu", "t"])
    await found.heard()
    return found


async def both_everywhere(stores: list[Store], seed: int, requests: int = 400) -> Run:
    """Both wait at both; others come and go, sometimes after having been served alone."""
    draw, clock = random.Random(seed), Clock()
    found = Run([Side(store, clock) for store in stores], clock, draw)
    for side in found.sides:
        for _ in range(draw.randrange(40)):
            side.put(draw.choice("tuv"), draw.randint(1, LARGEST))
            side.take(1.0)
            clock.now_s += draw.choice((0.0, PAUSE_S))
    await found.heard()
    for _ in range(requests):
        if not draw.randrange(4):
            for _ in range(draw.randrange(5)):
                draw.choice(found.sides).put(draw.choice("vw"), draw.randint(1, LARGEST))
        await found.step(["tu", "tu"])
    await found.heard()
    return found


@pytest.mark.parametrize("history", [one_everywhere, both_everywhere])
def test_two_tenants_are_given_the_same(run: Runner, history: Callable[[list[Store], int], Awaitable[Run]]) -> None:
    """Wherever they wait, whatever comes beside them, within the bound."""

    async def scenario(stores: Stores) -> None:
        for seed in range(5):
            assert (await history(await stores(2), seed)).unfairness <= BOUND

    run(scenario)


@given(st.integers(0, 1 << 30), st.sampled_from([one_everywhere, both_everywhere]))
@settings(max_examples=25, deadline=None)
def test_whatever_comes(seed: int, history: Callable[[list[Store], int], Awaitable[Run]]) -> None:
    """Likewise, of arrivals, sizes and delays that nobody chose."""

    async def scenario() -> None:
        assert (await history(await in_process(2), seed)).unfairness <= BOUND

    asyncio.run(scenario())


def test_who_counts_for_itself_is_not_fair() -> None:
    """The control: with a store each, one tenant is far ahead, and the further the longer it lasts."""

    async def scenario() -> None:
        for seed in range(5):
            found = await one_everywhere([InProcess(), InProcess()], seed)
            assert found.unfairness > BOUND
            assert found.given["t"] > 2.5 * found.given["u"]

    asyncio.run(scenario())


def test_three_share_as_two_do(run: Runner) -> None:
    """Of three sides, one tenant waits at all, the other at two."""

    async def scenario(stores: Stores) -> None:
        draw, clock = random.Random(1), Clock()
        found = Run([Side(store, clock) for store in await stores(3)], clock, draw)
        for _ in range(600):
            await found.step(["tu", "t", "tu"])
        assert found.unfairness <= 2 * BOUND

    run(scenario)


def test_one_that_comes_later_has_nothing_to_claim(run: Runner) -> None:
    """A side begins at nought while the first has served for long, or has served more by itself: nobody is made to
    wait for what was before.
    """

    async def scenario(stores: Stores) -> None:
        for alone in (0, 1):
            draw, clock = random.Random(alone), Clock()
            found = Run([Side(store, clock) for store in await stores(2)], clock, draw)
            first = found.sides[alone]
            for _ in range(300):
                first.put("t", LARGEST)
                first.take(1.0)
                clock.now_s += 0.02
                await found.heard()
            clock.now_s += LULL_S * alone
            for side in found.sides:
                side.served = 0
            for _ in range(300):
                await found.step(["tu", "tu"])
            assert found.unfairness <= BOUND

    run(scenario)


def test_the_store_keeps_its_scale(run: Runner) -> None:
    """One that has counted by itself for long takes the others', but for what its tenants are ahead."""

    async def scenario(stores: Stores) -> None:
        clock = Clock()
        found = Run([Side(store, clock) for store in await stores(2)], clock, random.Random(1))
        one, two = found.sides
        for _ in range(300):  # nobody hears of these
            two.queue.pass_by(Ask("w", 0, LARGEST))
        one.put("t", 10)
        await found.heard()
        two.put("w", 10)
        await found.heard()
        (counters,) = [each for name, each, _ in two.queue.groups() if name == "interactive"]
        assert counters.of("w") == LARGEST

    run(scenario)


def test_few_requests_ask(run: Runner) -> None:
    """One in ten of those that waited, and once a second while somebody waits; none that found a slot; nobody asks
    where there is nobody else.
    """

    async def scenario(stores: Stores) -> None:
        store, _ = await stores(2)
        assert isinstance(store, InProcess | RedisStore)
        clock = Clock()
        side = Side(store, clock)
        found = Run([side], clock, random.Random(1))
        before = store.commands
        for _ in range(200):
            await found.step(["tu"])
            await found.heard()
        assert store.commands - before <= 200 // EVERY + 1
        before = store.commands
        for _ in range(5):
            clock.now_s += PAUSE_S
            await side.turns.tend()
            await side.turns.tend()
            await found.heard()
        assert store.commands - before == 5
        store.members, before = 1, store.commands
        for _ in range(50):
            await found.step(["tu"])
        assert store.commands == before

    run(scenario)


class Late(InProcess):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()

    async def ask(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """See `shared_turns.Store`."""
        found = await super().ask(script, keys, *arguments)
        await self.let.wait()
        return found


def test_a_version_with_another_queue_is_asked_for_once() -> None:
    """Its replicas went and came while an answer was on its way: no second question, and the first is waited for."""

    async def scenario() -> None:
        store, clock = Late(), Clock()
        side = Side(store, clock)
        side.put("t", 1)
        await asyncio.sleep(0)
        side.queue = FairQueue(Crowd(UNBOUNDED), UNBOUNDED, SharedCounters)
        side.put("t", 1)
        closing = asyncio.create_task(side.turns.close())
        await asyncio.sleep(0.01)
        assert (store.commands, closing.done()) == (1, False)
        store.let.set()
        await closing
        await side.turns.tend()
        await side.turns.close()
        assert store.commands == 2, "the queue that is there now"

    run_virtually(scenario())


def is_up(store: RedisStore) -> bool:
    return store.is_up  # mypy would take the attribute for unchanged


@pytest.mark.parametrize("fault", ["killed", "paused", "emptied"])
def test_without_redis(fault: str) -> None:
    """Each side goes on by itself and asks once at most; when it is back they are fair together again, of all that
    comes from then on.
    """
    answer_s = 2.0 if fault == "paused" else 20.0

    async def scenario() -> None:
        with RedisServer() as server:
            async with (
                asyncio.timeout(120),
                open_store(server.url, "one", answer_s) as one,
                open_store(server.url, "two", answer_s) as two,
            ):
                await one.beat()
                clock = Clock()
                found = Run([Side(store, clock) for store in (one, two)], clock, random.Random(1))
                for _ in range(100):
                    await found.step(["tu", "t"])
                await found.heard()
                match fault:
                    case "killed":
                        server.kill()
                    case "paused":
                        server.pause()
                    case _:
                        server.ask("FLUSHALL")
                if fault != "emptied":
                    before = one.commands + two.commands
                    for _ in range(200):
                        await found.step(["tu", "t"])
                    await found.heard()
                    assert one.commands + two.commands - before <= 2
                    assert [is_up(one), is_up(two)] == [False, False]
                    server.start() if fault == "killed" else server.resume()
                    while not (is_up(one) and is_up(two)):
                        await asyncio.gather(one.beat(), two.beat())
                    await one.beat()
                found.ahead.clear()
                for _ in range(400):
                    await found.step(["tu", "t"])
                await found.heard()
                assert found.unfairness <= BOUND

    asyncio.run(scenario())
