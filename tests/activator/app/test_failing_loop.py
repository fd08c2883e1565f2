"""A defect in one loop of the activator ends neither the activator nor the loop."""

import asyncio
from pathlib import Path

from tests.activator.world import world


async def test_failing_loop_leaves_the_activator_serving_and_not_ready(tmp_path: Path) -> None:
    """Requests are still served. The metric names the loop, and `/readyz` names it from the fifth error on."""
    fails = tmp_path / "fails"

    async with world(tmp_path, program="tests.activator.failing_loop", fails=fails) as here:
        await here.replica("a")
        assert (await here.own("/readyz")).status == 200
        fails.touch()
        async with asyncio.timeout(60):
            while (ready := await here.own("/readyz")).status == 200:
                assert (await here.post()).status == 200
                await asyncio.sleep(0.05)
        assert b"key uses" in ready.body
        assert (await here.own("/healthz")).status == 200
        assert (await here.post()).status == 200
        assert await here.metric_value("kelvin_loop_errors_total", loop="key uses") > 0
        assert await here.metric_value("kelvin_loops_failing") == 1
        (here.data / "log").write_text("")  # the tracebacks in the log are expected
