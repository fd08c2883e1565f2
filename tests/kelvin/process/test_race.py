"""A race returns when its first awaitable ends. The others are cancelled and awaited."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Cancelled
from kelvin.process.race import first_completed, run_until_disconnect


class Work:
    """Work that ends after a time. When cancelled, it takes more time to clean up."""

    def __init__(self, over_s: float, goes_s: float = 0.0) -> None:
        self._over_s, self._goes_s = over_s, goes_s
        self.is_gone = False

    async def do(self) -> None:
        try:
            await asyncio.sleep(self._over_s)
        except asyncio.CancelledError:
            await asyncio.sleep(self._goes_s)
            raise
        finally:
            self.is_gone = True


@pytest.mark.virtual_time
async def test_race_ends_the_losers() -> None:
    """`first_completed` returns after the slower one has cleaned up."""
    loop = asyncio.get_running_loop()
    slow, quick = Work(60.0, goes_s=2.0), Work(1.0)
    assert await first_completed(slow.do(), quick.do()) == (False, True)
    assert slow.is_gone
    assert loop.time() == pytest.approx(3.0)


@pytest.mark.virtual_time
async def test_race_keeps_two_results_of_one_tick() -> None:
    """Both results are reported if both end in the same tick."""
    assert await first_completed(asyncio.sleep(1.0), asyncio.sleep(1.0)) == (True, True)


@pytest.mark.virtual_time
async def test_race_raises_the_first_error() -> None:
    """The error is raised after the other awaitable has ended."""

    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise OSError("away")

    other = Work(60.0)
    with pytest.raises(OSError, match="away"):
        await first_completed(other.do(), fails())
    assert other.is_gone


@pytest.mark.virtual_time
async def test_cancelled_race_cancels_all() -> None:
    """A cancelled race ends both."""
    one, two = Work(60.0), Work(60.0, goes_s=1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await first_completed(one.do(), two.do())
    assert one.is_gone
    assert two.is_gone


@pytest.mark.virtual_time
async def test_work_ends_when_its_client_disconnects() -> None:
    """A disconnect cancels the work. Otherwise the caller gets its result or its exception."""
    left = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def fail() -> None:
        raise KeyError("x")

    assert await run_until_disconnect(receive, asyncio.sleep(5, "done")) == "done"
    with pytest.raises(KeyError):
        await run_until_disconnect(receive, fail())
    work = Work(3600.0, goes_s=1.0)
    asyncio.get_running_loop().call_later(2, left.set)
    async with asyncio.timeout(5.0):
        with pytest.raises(Refused) as refused:
            await run_until_disconnect(receive, work.do())
    assert refused.value.failure == Cancelled()
    assert work.is_gone
