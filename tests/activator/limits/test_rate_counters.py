"""Limits per minute, counted in process and in a real Redis: the same tests for both counters."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from activator.limits.policy.token_block import QUIET_S
from activator.limits.rate_limits import LocalRateCounter, RateCounter, TokenReservation
from activator.limits.redis_rate_counter import RedisRateCounter
from activator.limits.redis_store import open_store
from tests.activator.clock import Clock
from tests.activator.redis_server import RedisServer


@dataclass
class CounterWorld:
    """A counter and its clock."""

    counting: RateCounter
    clock: Clock = field(default_factory=Clock)

    async def take(self, tenant: str, limit: int, units: int) -> float | None:
        """Use so many units. Return the wait if they are refused."""
        found = await self.counting.hold(tenant, limit, units)
        if found.wait_s is None:
            self.counting.settle(tenant, limit, units, units)
        return found.wait_s


@asynccontextmanager
async def in_process() -> AsyncIterator[CounterWorld]:
    clock = Clock()
    yield CounterWorld(LocalRateCounter(clock), clock)


@asynccontextmanager
async def over_redis() -> AsyncIterator[CounterWorld]:
    clock = Clock()
    with RedisServer() as server:
        async with open_store(server.url, "one", 20.0) as store:
            shared = RedisRateCounter(store, "requests", clock)
            yield CounterWorld(shared, clock)
            await shared.close()


PLACES = pytest.mark.parametrize("opened", [in_process, over_redis])
Opened = Callable[[], AbstractAsyncContextManager[CounterWorld]]


@PLACES
async def test_rate_limit_allows_one_minutes_worth(opened: Opened) -> None:
    """Each tenant has its own limit."""

    async with opened() as counter_world:
        assert [await counter_world.take("a", 5, 1) for _ in range(5)] == [None] * 5
        refused = await counter_world.take("a", 5, 1)
        assert refused is not None
        assert 0 < refused <= 12.0
        assert await counter_world.take("b", 5, 5) is None


@PLACES
async def test_a_reservation_is_settled_once(opened: Opened) -> None:
    """Held units are not available. Unused ones return at settlement. A second settlement changes nothing."""

    async with opened() as counter_world:
        counting = counter_world.counting
        assert (await counting.hold("a", 100, 90)).wait_s is None
        assert (await counting.hold("a", 100, 20)).wait_s is not None
        reservation = TokenReservation(counting, "a", 100, 90)
        reservation.settle(10)
        reservation.settle(10)
        counter_world.clock.now_s += QUIET_S  # after a refusal the shared bucket is not queried for this long
        found = await counting.hold("a", 100, 89)
        assert (found.wait_s, found.limit) == (None, 100)
        counting.settle("a", 100, 89, 0)
        assert 89 <= counting.rate_status("a", 100).remaining <= 92
