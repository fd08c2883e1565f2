"""An engine that makes no progress ends its replica; one that is slow does not."""

import asyncio
import time
from pathlib import Path

from contracts.errors import Unavailable
from contracts.frames import FrameKind
from contracts.jobs import RuntimeState
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import DEADLINE_S, Bench, saying
from tests.runtime.scenes import play

STEP_S = 0.2


def test_hung_engine_ends_its_replica(tmp_path: Path) -> None:
    """Its requests are told, so that another replica may answer them, and the process ends."""
    engine = ScriptedEngine(saying("hello"), paced=True)

    async def scene(each: Bench) -> None:
        answering = asyncio.create_task(each.frames())
        async with asyncio.timeout(DEADLINE_S):
            await each.replica.over.wait()
        assert each.replica.failure == Unavailable("this replica")
        assert each.replica.state is RuntimeState.FAILED
        assert (await answering)[-1].kind is FrameKind.FAILED
        engine.free_running()

    play(tmp_path, engine, scene, step_s=STEP_S)


def test_slow_engine_that_moves_on_by_layers_is_not_hung(tmp_path: Path) -> None:
    """A step over the longest prompt may take many times as long as a layer: the control of the above. That a real
    engine reports each layer is tested in engine/test_core.py.
    """
    engine = ScriptedEngine(saying("hello"), paced=True)

    async def scene(each: Bench) -> None:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 8 * STEP_S:
            engine.progressed_s = time.monotonic()
            await asyncio.sleep(STEP_S / 10)
        assert each.replica.failure is None
        engine.free_running()
        assert (await answering)[-1].kind is FrameKind.END

    play(tmp_path, engine, scene, step_s=STEP_S)
