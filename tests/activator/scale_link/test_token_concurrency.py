"""A model that scales by tokens, at an activator process: the reported concurrency of two requests."""

import asyncio
from pathlib import Path

from activator.queue.policy.wait_estimate import MIN_ANSWERS
from kelvin.contracts.serving.control_messages import ModelRow
from tests.activator.control import VERSION, FakeControl
from tests.activator.replica import Held, ReceivedRequest
from tests.activator.world import ActivatorWorld, world
from tests.eventually import eventually

TINY = 1e-6  # seconds: the rest of any request is more than a slot computes in this time


async def scaled_by(here: ActivatorWorld, backlog_s: float) -> None:
    """Set the model's backlog from now on."""
    aliases = {"prod": VERSION}
    row = ModelRow(tenant="default", model="m", aliases=aliases, created_at_s=7, backlog_s=backlog_s)
    await here.publish(models=(row,))


async def most_of(control: FakeControl, reports: int) -> float:
    """Return the largest concurrency of the next reports."""
    before = len(control.stats)
    await eventually(lambda: len(control.stats) >= before + reports)
    return max(stat.concurrency for stat in control.stats[before:])


async def test_two_long_requests_report_higher_concurrency(tmp_path: Path) -> None:
    """The weighting applies while the setting is on, once the throughput was measured."""
    held = Held(first=ReceivedRequest.open)

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await scaled_by(here, TINY)
        for _ in range(MIN_ANSWERS):
            assert (await here.post()).status == 200
        await scaled_by(here, 0.0)
        replica.script = held
        request_tasks = [asyncio.create_task(here.post()) for _ in range(2)]
        assert await most_of(here.control, 4) <= 2.0, "by requests"
        await scaled_by(here, TINY)
        await most_of(here.control, 1)
        assert await most_of(here.control, 2) > 50.0, "by tokens"
        await scaled_by(here, 0.0)
        await most_of(here.control, 1)
        assert await most_of(here.control, 2) <= 2.0, "and by requests again"
        held.release()
        assert [(await each).status for each in request_tasks] == [200, 200]
