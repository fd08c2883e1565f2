"""A model that scales by tokens, at the activator as a program: what the decider is told of two requests."""

import asyncio
from pathlib import Path

from activator.queue.policy.wait_estimate import MIN_ANSWERS
from kelvin.contracts.serving.control_messages import ModelRow
from tests.activator.control import VERSION, FakeControl
from tests.activator.replica import Held, ReceivedRequest
from tests.activator.world import ActivatorWorld, world
from tests.eventually import eventually

TINY = 1e-6  # seconds: whatever is left of a request is more than a slot computes in it


async def scaled_by(here: ActivatorWorld, backlog_s: float) -> None:
    """From now on."""
    aliases = {"prod": VERSION}
    row = ModelRow(tenant="default", model="m", aliases=aliases, created_at_s=7, backlog_s=backlog_s)
    await here.publish(models=(row,))


async def most_of(control: FakeControl, reports: int) -> float:
    """Of so many reports, from now on, the largest."""
    before = len(control.stats)
    await eventually(lambda: len(control.stats) >= before + reports)
    return max(stat.concurrency for stat in control.stats[before:])


async def test_two_long_requests_report_higher_concurrency(tmp_path: Path) -> None:
    """Where the setting is on, once answers were measured, and only as long as it is."""
    held = Held(first=ReceivedRequest.open)

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await scaled_by(here, TINY)
        for _ in range(MIN_ANSWERS):
            assert (await here.post()).status == 200
        await scaled_by(here, 0.0)
        replica.script = held
        asked = [asyncio.create_task(here.post()) for _ in range(2)]
        assert await most_of(here.control, 4) <= 2.0, "by requests"
        await scaled_by(here, TINY)
        await most_of(here.control, 1)
        assert await most_of(here.control, 2) > 50.0, "by tokens"
        await scaled_by(here, 0.0)
        await most_of(here.control, 1)
        assert await most_of(here.control, 2) <= 2.0, "and by requests again"
        held.release()
        assert [(await each).status for each in asked] == [200, 200]
