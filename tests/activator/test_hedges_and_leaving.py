"""Whoever leaves at whatever moment, whatever replicas do: no slot, connection, task or uncounted request is left."""

import asyncio
import random
from pathlib import Path

import pytest

from activator.policy.hedge import HedgeLimits
from activator.policy.retries import RetryLimits
from contracts.errors import Refused, Unavailable
from contracts.frames import FrameKind
from contracts.problem import code_of
from tests.activator.hedging import Asked, Ground, ground, outcome
from tests.activator.replica import Call, Script
from tests.activator.test_hedges import heard, says

REQUESTS = 150
AT_A_TIME = 10
HALF = HedgeLimits(samples=1, share=0.5, least_s=0.0)  # of all requests are late
FREE = RetryLimits(per_s=1e6)  # of what a budget holds back there is a test elsewhere


def erratic(name: str, chance: random.Random) -> Script:
    """A replica that takes its time over each step, and breaks or refuses at any of them."""
    whole = says(name)

    async def moment() -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.004, 0.012)) * chance.random())

    async def script(call: Call) -> None:
        fate = chance.random() if name != "d" else 0.5  # one is there always: nobody waits for a start
        await moment()
        if fate < 0.1:
            call.refuse(Unavailable("this replica"))
            return
        if fate < 0.2:
            call.cut()
            return
        if fate < 0.6:
            await call.write(FrameKind.BEAT)
            await moment()
            if fate < 0.25:
                call.cut()
                return
        await whole(call)

    return script


async def _one(here: Ground, chance: random.Random) -> tuple[Asked, str]:
    """What became of it."""
    asked = here.ask()
    if chance.random() < 0.4:
        await asyncio.sleep(chance.random() * 0.02)
        asked.task.cancel()
    await asyncio.wait((asked.task,))
    if asked.task.cancelled():
        return asked, "left"
    refused = await outcome(asked)
    if refused is None:
        return asked, "answered"
    assert isinstance(refused, Refused), refused
    return asked, code_of(refused.failure)


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_of_requests_that_come_and_go(tmp_path: Path, seed: int) -> None:
    """Each answer is one replica's, whole, and its account names that one; `ground` looks at what is left."""
    chance = random.Random(seed)

    async with ground(tmp_path, HALF, FREE, rest_s=0.001) as here:
        for name in "abcd":
            await here.replica(name, erratic(name, chance), max_streams=3)
        many = asyncio.Semaphore(AT_A_TIME)

        async def bounded() -> tuple[Asked, str]:
            async with many:
                return await _one(here, chance)

        ends = await asyncio.gather(*(bounded() for _ in range(REQUESTS)))
        assert {end for _, end in ends} <= {"left", "answered", "replica_lost", "unavailable"}
        for asked, end in ends:
            if end == "answered":
                assert heard(asked) == 3 * str(asked.call.account.runtime_id)
        assert sum(end == "answered" for _, end in ends) > REQUESTS / 4
        assert here.came(), "nobody was late"
