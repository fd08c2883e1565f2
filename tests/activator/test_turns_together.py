"""Throttlers of several activators over one real Redis: whose turn it is, they know together."""

import asyncio
from collections import Counter, deque
from pathlib import Path

import pytest

from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.shared_store import RedisStore, open_store
from activator.shared_turns import SharedTurns
from activator.throttler import Throttler
from contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.redis_server import RedisServer
from tests.activator.replica import Held
from tests.activator.test_throttler import KEY, Bell, _feed
from tests.activator.world import world

TOKENS = 10
WIDE = Bound(1000, 100_000, 100_000)


class Door:
    """One activator's: a replica with one slot, and who has it."""

    def __init__(self, store: RedisStore | None) -> None:
        self.turns = None if store is None else SharedTurns(store)
        self.throttler = Throttler(QueueLimits(WIDE, WIDE, WIDE, 60.0), Bell(), turns=self.turns, draw=lambda n: 0)
        self.throttler.apply(_feed(replica_row("a", 1)))
        self.inside: deque[tuple[Replica, Ask]] = deque()

    async def come(self, tenant: str) -> None:
        """A request, which stays inside."""
        ask = Ask(tenant, 10, TOKENS)
        until = Deadline.after(60.0, asyncio.get_running_loop().time())
        self.inside.append((await self.throttler.acquire(KEY, ask, until), ask))

    async def next(self) -> str:
        """Who is inside ends; whose the next one is."""
        replica, ask = self.inside.popleft()
        self.throttler.release(KEY, replica, ask, TOKENS)
        while not self.inside:
            await asyncio.sleep(0)
        if self.turns is not None:
            await self.turns.close()
        self.throttler.check_integrity()
        return self.inside[0][1].tenant


@pytest.mark.parametrize("shared", [pytest.param(True, id="together"), pytest.param(False, id="each for itself")])
def test_who_waits_at_one_has_its_part_of_both(shared: bool) -> None:
    """One tenant waits at two doors, another at one of them: they are served alike. The control gives the first one
    three times as much.
    """

    async def scenario() -> None:
        with RedisServer() as server:
            async with (
                asyncio.timeout(60),
                open_store(server.url, "one", 20.0) as one,
                open_store(server.url, "two", 20.0) as two,
            ):
                await one.beat()
                doors = [Door(store if shared else None) for store in (one, two)]
                for door in doors:
                    await door.come("t")
                waiting = [asyncio.create_task(door.come("t")) for door in doors for _ in range(105)]
                waiting += [asyncio.create_task(doors[0].come("u")) for _ in range(105)]
                await asyncio.sleep(0)
                served = Counter([await door.next() for _ in range(100) for door in doors])
                if shared:
                    assert abs(served["t"] - served["u"]) <= 2 * 10 + 2
                else:
                    assert served["t"] == 3 * served["u"]
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for door in doors:
                    if door.turns is not None:
                        await door.turns.close()

    asyncio.run(scenario())


def test_an_activator_tells_its_turns(tmp_path: Path) -> None:
    """Named by its setting, and while another one uses that Redis: when a request waits, and not before."""
    held = Held()

    async def scenario() -> None:
        with RedisServer() as server:
            async with world(tmp_path, redis=server.url) as here, open_store(server.url, "other", 20.0) as other:
                replica = await here.replica("a", held, max_streams=1)
                first = asyncio.create_task(here.post())
                await replica.until(lambda r: len(r.calls) == 1)
                assert server.ask("KEYS", "*turns").startswith(b"*0")
                second = asyncio.create_task(here.post())
                async with asyncio.timeout(30):
                    while server.ask("KEYS", "*turns").startswith(b"*0"):
                        await other.beat()
                        await asyncio.sleep(0.05)
                held.release()
                assert [(await each).status for each in (first, second)] == [200, 200]
                assert await here.terminate() == 0

    asyncio.run(scenario())
