"""Questions under way: one for a name at a time, for all who wait, whoever of them ends; and an end that is quick."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activator.limits.single_flight import SingleFlight, run_every

pytestmark = pytest.mark.virtual_time

Question = Coroutine[Any, Any, None]


@asynccontextmanager
async def settling() -> AsyncIterator[SingleFlight]:
    """In the end nothing is asked."""
    asking = SingleFlight()
    yield asking
    assert len(asking) == 0


class Store:
    """Grants ten units a second after each question."""

    def __init__(self) -> None:
        self.units = 0
        self.asked: list[int] = []

    async def ask(self, units: int) -> None:
        self.asked.append(units)
        await asyncio.sleep(1.0)
        self.units += 10

    def take(self, units: int) -> Callable[[bool], int | None]:
        """Decide for so many: None while they are not there."""

        def decide(is_asking: bool) -> int | None:
            if self.units < units:
                return None
            self.units -= units
            return units

        return decide


async def test_waiting_caller_may_be_cancelled() -> None:
    """Three wait for one answer, and one gives up: the question goes on, and the next one is for who is left."""
    async with settling() as asking:
        store = Store()
        one, two, three = (
            asyncio.create_task(asking.ask_until_decided("a", units, store.take(units), store.ask))
            for units in (3, 6, 7)
        )
        other = asyncio.create_task(asking.ask_until_decided("b", 20, lambda is_asking: 20, store.ask))
        await asyncio.sleep(0.5)
        assert ("a" in asking, "b" in asking, other.result()) == (True, False, 20)
        one.cancel()
        await asyncio.wait((one,))
        assert await two == 6
        assert await three == 7
        assert store.asked == [3, 7]


async def test_waiting_callers_share_the_next_query() -> None:
    """Those that one answer was not enough for."""
    async with settling() as asking:
        store = Store()
        assert (
            await asyncio.gather(*(asking.ask_until_decided("a", 4, store.take(4), store.ask) for _ in range(5)))
            == [4] * 5
        )
        assert store.asked == [4, 12]


async def test_failed_query_frees_its_key() -> None:
    """The loop is told of it, its name is free, and who waited decides again."""
    told: list[type] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(type(context["exception"])))
    async with settling() as asking:
        found = iter((None, 5))

        async def question(units: int) -> None:
            raise KeyError("a")

        assert await asking.ask_until_decided("a", 1, lambda is_asking: next(found), question) == 5
    assert told == [KeyError]


async def test_tending_asks_several_names_at_once() -> None:
    """Those for which something is due, and which are not asked for already: a few at a time, as leases have an end."""
    async with settling() as asking:
        store, seen = Store(), list[str]()

        async def question(name: str) -> None:
            await asyncio.sleep(1.0)
            seen.append(name)

        def due(name: str) -> Question | None:
            return None if name == "a" else question(name)

        waiting = asyncio.create_task(asking.ask_until_decided("b", 1, store.take(1), store.ask))
        await asyncio.sleep(0.5)
        began_s = asyncio.get_running_loop().time()
        await asking.tend("abcdefghijk", due)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
        assert [sorted(seen[:6]), sorted(seen[6:])] == [list("cdefgh"), list("ijk")]
        await waiting


async def test_close_is_bounded_and_waits_for_running_queries() -> None:
    """What gives back has a second; what was asked before is waited for, as it ends by itself."""
    async with settling() as asking:
        loop = asyncio.get_running_loop()
        found = iter((None, 1))
        waiting = asyncio.create_task(
            asking.ask_until_decided("a", 1, lambda is_asking: next(found), lambda _: asyncio.sleep(3.0))
        )
        await asyncio.sleep(0)
        began_s = loop.time()
        await asking.close(asyncio.sleep(60.0))
        assert loop.time() - began_s == pytest.approx(3.0)
        await waiting


async def test_run_every_repeats_until_cancelled() -> None:
    """So often, and not at once."""
    seen: list[float] = []
    loop = asyncio.get_running_loop()

    async def tend() -> None:
        seen.append(loop.time())

    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await run_every(1.0, tend)
    assert [at_s - began_s for at_s in seen] == pytest.approx([1.0, 2.0])
