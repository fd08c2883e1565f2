"""Activators that lease slots of the same replicas from one real Redis, as far as their lines and leases go."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from activator.line import Replica
from activator.policy.admission import QueueLimits
from activator.policy.ask import Ask
from activator.policy.bounds import Bound
from activator.shared_slots import SharedSlots
from activator.shared_store import RedisStore, open_store
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.deadline import Deadline
from tests.activator.control import replica_row
from tests.activator.redis_server import RedisServer
from tests.activator.test_rates import Clock
from tests.activator.test_throttler import KEY, Bell

SLOTS = 8
ASK = Ask("default", 10, 10)
WIDE = Bound(1000, 100_000, 100_000)
HASH = f"kelvin:{{{KEY.tenant}/{KEY.version}}}:slots"


class Door:
    """One activator's: requests that wait for a replica, and those that are inside."""

    def __init__(
        self,
        store: RedisStore,
        slots: int = SLOTS,
        turn_s: float = 2.0,
        leased_s: float = 60.0,
        replicas: str = "a",
        seed: int | None = None,
        *,
        subsets: bool = True,
    ) -> None:
        self.store, self.clock = store, Clock()
        self.slots = SharedSlots(store, self.clock, leased_s, turn_s, subsets)
        limits = QueueLimits(WIDE, WIDE, WIDE, 60.0)
        draw = (lambda n: 0) if seed is None else random.Random(seed).randrange
        self.throttler = Throttler(limits, Bell(), slots=self.slots, draw=draw)
        rows = tuple(replica_row(name, slots) for name in replicas)
        self.throttler.apply(Feed(revision=1, full=False, replicas=rows))
        self._coming: list[asyncio.Task[Replica]] = []

    @property
    def inside(self) -> int:
        """Requests that replicas have from here."""
        return sum(task.done() for task in self._coming)

    @property
    def waiting(self) -> int:
        return len(self._coming) - self.inside

    @property
    def at(self) -> list[str]:
        """Where those that are inside are, in the order in which they came."""
        return [task.result().row.runtime_id for task in self._coming if task.done()]

    @property
    def preferred(self) -> set[str]:
        """Replicas that it prefers."""
        return {name for name, each in self.throttler.line_of(KEY).replicas.items() if each.is_preferred}

    async def come(self, many: int = 1, ask: Ask = ASK) -> None:
        """So many more requests, which stay inside."""
        until = Deadline.after(60.0, asyncio.get_running_loop().time())
        for _ in range(many):
            self._coming.append(asyncio.create_task(self.throttler.acquire(KEY, ask, until)))
        await asyncio.sleep(0)

    def leave(self, many: int = 1) -> None:
        """So many of those that are inside end, as far as there are such."""
        for task in [task for task in self._coming if task.done()][:many]:
            self._coming.remove(task)
            self.throttler.release(KEY, task.result(), ASK, 10)

    async def give_up(self) -> None:
        """Nobody waits any more."""
        gone = [task for task in self._coming if not task.done()]
        self._coming = [task for task in self._coming if task.done()]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def heard(self) -> None:
        """All answers have come, and who waited for them goes on."""
        turns = 0
        while turns < 5:  # of the loop, in which nothing was asked: so many who belongs somewhere needs
            turns = 0 if self.slots.is_asking else turns + 1
            await asyncio.sleep(0 if turns else 0.001)  # the limit is that of `doors`
        self.throttler.check_integrity()

    async def pass_s(self, seconds: float) -> None:
        """So long by its clock, and what is due is done."""
        self.clock.now_s += seconds
        await self.slots.tend()
        await self.heard()

    async def end(self) -> None:
        for task in self._coming:
            task.cancel()
        await asyncio.gather(*self._coming, return_exceptions=True)
        await self.slots.close()


@asynccontextmanager
async def doors(
    *servers: RedisServer,
    slots: int = SLOTS,
    answer_s: float = 20.0,
    turn_s: float = 2.0,
    leased_s: float = 60.0,
    replicas: str = "a",
    is_random: bool = False,
    subsets: bool = True,
) -> AsyncIterator[list[Door]]:
    """One for each, which know of each other where they share a server, however busy the machine is."""
    async with asyncio.timeout(60), AsyncExitStack() as ladder:
        stores = [
            await ladder.enter_async_context(open_store(server.url, f"door-{number}", answer_s))
            for number, server in enumerate(servers)
        ]
        for store in stores:
            await store.beat()
        found = [
            Door(store, slots, turn_s, leased_s, replicas, number if is_random else None, subsets=subsets)
            for number, store in enumerate(stores)
        ]
        for door in found:
            ladder.push_async_callback(door.end)
        yield found


@asynccontextmanager
async def beating(store: RedisStore) -> AsyncIterator[None]:
    """Others know that it lives, and it knows of them."""
    task = asyncio.create_task(store.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
