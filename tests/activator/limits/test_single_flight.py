"""SingleFlight on virtual time: one query per key at a time, shared by all waiting callers, and a bounded close."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activator.limits.single_flight import SingleFlight
from kelvin.process.loops import run_every

pytestmark = pytest.mark.virtual_time

Query = Coroutine[Any, Any, None]


@asynccontextmanager
async def open_single_flight() -> AsyncIterator[SingleFlight]:
    """Yield a SingleFlight. At the end it must have no running query."""
    single_flight = SingleFlight()
    yield single_flight
    assert len(single_flight) == 0


class Store:
    """A store whose query takes a second and adds ten units."""

    def __init__(self) -> None:
        self.units = 0
        self.queries: list[int] = []

    async def ask(self, units: int) -> None:
        self.queries.append(units)
        await asyncio.sleep(1.0)
        self.units += 10

    def take(self, units: int) -> Callable[[bool], int | None]:
        """Return a decision for so many units: None while they are not there."""

        def decide(is_querying: bool) -> int | None:
            if self.units < units:
                return None
            self.units -= units
            return units

        return decide


async def test_waiting_caller_may_be_cancelled() -> None:
    """Three callers wait for one query, and one is cancelled. The query goes on. The next one is for the
    last caller."""
    async with open_single_flight() as single_flight:
        store = Store()
        one, two, three = (
            asyncio.create_task(single_flight.query_until_decided("a", units, store.take(units), store.ask))
            for units in (3, 6, 7)
        )
        other = asyncio.create_task(single_flight.query_until_decided("b", 20, lambda is_querying: 20, store.ask))
        await asyncio.sleep(0.5)
        assert ("a" in single_flight, "b" in single_flight, other.result()) == (True, False, 20)
        one.cancel()
        await asyncio.wait((one,))
        assert await two == 6
        assert await three == 7
        assert store.queries == [3, 7]


async def test_waiting_callers_share_the_next_query() -> None:
    """Callers that the first query did not satisfy wait for one more."""
    async with open_single_flight() as single_flight:
        store = Store()
        assert (
            await asyncio.gather(
                *(single_flight.query_until_decided("a", 4, store.take(4), store.ask) for _ in range(5))
            )
            == [4] * 5
        )
        assert store.queries == [4, 12]


async def test_failed_query_frees_its_key() -> None:
    """The error goes to the loop's exception handler. The key is free, and the waiting caller decides again."""
    errors: list[type] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(type(context["exception"])))
    async with open_single_flight() as single_flight:
        found = iter((None, 5))

        async def question(units: int) -> None:
            raise KeyError("a")

        assert await single_flight.query_until_decided("a", 1, lambda is_querying: next(found), question) == 5
    assert errors == [KeyError]


async def test_tending_asks_several_names_at_once() -> None:
    """Keys that are due and not queried already are queried, a few at a time, because leases expire."""
    async with open_single_flight() as single_flight:
        store, seen = Store(), list[str]()

        async def question(name: str) -> None:
            await asyncio.sleep(1.0)
            seen.append(name)

        def due(name: str) -> Query | None:
            return None if name == "a" else question(name)

        waiting = asyncio.create_task(single_flight.query_until_decided("b", 1, store.take(1), store.ask))
        await asyncio.sleep(0.5)
        began_s = asyncio.get_running_loop().time()
        await single_flight.maintain("abcdefghijk", due)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
        assert [sorted(seen[:6]), sorted(seen[6:])] == [list("cdefgh"), list("ijk")]
        await waiting


async def test_close_is_bounded_and_waits_for_running_queries() -> None:
    """The returned leases have a second. A query that runs already is waited for, because it ends by itself."""
    async with open_single_flight() as single_flight:
        loop = asyncio.get_running_loop()
        found = iter((None, 1))
        waiting = asyncio.create_task(
            single_flight.query_until_decided("a", 1, lambda is_querying: next(found), lambda _: asyncio.sleep(3.0))
        )
        await asyncio.sleep(0)
        began_s = loop.time()
        await single_flight.close(asyncio.sleep(60.0))
        assert loop.time() - began_s == pytest.approx(3.0)
        await waiting


async def test_run_every_repeats_until_cancelled() -> None:
    """The first call comes after one interval."""
    seen: list[float] = []
    loop = asyncio.get_running_loop()

    async def tend() -> None:
        seen.append(loop.time())

    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await run_every(1.0, tend)
    assert [at_s - began_s for at_s in seen] == pytest.approx([1.0, 2.0])
