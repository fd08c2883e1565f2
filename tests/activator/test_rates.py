"""Every place where limits per minute are counted: the same claims of each."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from activator.rates import Counting, InProcess, Reservation


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Ground:
    """A place, and how time passes there."""

    counting: Counting
    clock: Clock = field(default_factory=Clock)

    async def take(self, tenant: str, limit: int, units: int) -> float | None:
        """Use so many; how long to wait where they are refused."""
        found = await self.counting.hold(tenant, limit, units)
        if found.wait_s is None:
            self.counting.settle(tenant, limit, units, units)
        return found.wait_s


@asynccontextmanager
async def in_process() -> AsyncIterator[Ground]:
    clock = Clock()
    yield Ground(InProcess(clock), clock)


@pytest.mark.parametrize("opened", [in_process])
def test_a_minutes_worth_and_no_more(opened) -> None:  # type: ignore[no-untyped-def]
    """Of one tenant; another one has its own."""

    async def scenario() -> None:
        async with opened() as ground:
            assert [await ground.take("a", 5, 1) for _ in range(5)] == [None] * 5
            refused = await ground.take("a", 5, 1)
            assert refused is not None
            assert 0 < refused <= 12.0
            assert await ground.take("b", 5, 5) is None

    asyncio.run(scenario())


@pytest.mark.parametrize("opened", [in_process])
def test_a_reservation_is_settled_once(opened) -> None:  # type: ignore[no-untyped-def]
    """What is held is nobody else's; what was not used is there again; a second word changes nothing."""

    async def scenario() -> None:
        async with opened() as ground:
            counting = ground.counting
            assert (await counting.hold("a", 100, 90)).wait_s is None
            assert (await counting.hold("a", 100, 20)).wait_s is not None
            reservation = Reservation(counting, "a", 100, 90)
            reservation.settle(10)
            reservation.settle(10)
            found = await counting.hold("a", 100, 89)
            assert (found.wait_s, found.limit) == (None, 100)
            counting.settle("a", 100, 89, 0)
            assert 89 <= counting.standing("a", 100).remaining <= 91

    asyncio.run(scenario())
