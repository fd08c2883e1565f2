"""Turns are bounded, waited for a little, and given back whoever leaves and why."""

import asyncio

import pytest

from contracts.errors import Refused
from contracts.traffic_errors import Overloaded
from snapshotter.turns import Turns


def test_turns() -> None:
    """The third of two is told to come back; a turn that was given back, also by an error, is free again."""

    async def fail_inside(turns: Turns) -> None:
        async with turns.take():
            with pytest.raises(Refused) as caught:
                await turns.take(wait_s=0).__aenter__()
            assert caught.value.failure == Overloaded("the bench", 2, 1.0)
            raise ZeroDivisionError

    async def scenario() -> None:
        turns = Turns("the bench", 2)
        async with turns.take():
            with pytest.raises(ZeroDivisionError):
                await fail_inside(turns)
            async with turns.take(wait_s=0):
                waiter = asyncio.create_task(turns.take().__aenter__())
                await asyncio.sleep(0)
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)
        async with turns.take(wait_s=0), turns.take(wait_s=0):
            assert repr(turns) == "<Turns the bench limit=2>"

    asyncio.run(scenario())
