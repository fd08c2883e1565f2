"""What a kubelet and Knative's activator are told by a runtime in a pod: while it starts, serves, hangs and drains."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.frames import FrameKind
from contracts.jobs import Bind, RuntimeReport, RuntimeState
from contracts.timeline import Span, Stage
from contracts.wire import decode
from runtime.app import _drain_with
from runtime.control_api import HANGS, build_probes
from runtime.serving import Served, Wiring
from runtime.settings import RuntimeSettings
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import BIND, DEADLINE_S, Bench, saying
from tests.runtime.scenes import play

QUEUE = {"K-Network-Probe": "queue"}
NEVER_S = 3600.0  # a step that long hangs


async def asked(each: Bench, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    async with each.session.get(f"http://rt{path}", headers=headers) as answer:
        return answer.status, await answer.read()


async def statuses(each: Bench) -> tuple[int, int, int]:
    """Alive, ready, and what Knative's activator is told."""
    found = [await asked(each, "/healthz"), await asked(each, "/readyz"), await asked(each, "/healthz", QUEUE)]
    return found[0][0], found[1][0], found[2][0]


@pytest.mark.parametrize(
    ("step_s", "want"),
    [
        pytest.param(0.02, (503, 503, 503), id="longer than a step may last"),
        pytest.param(NEVER_S, (200, 200, 200), id="the control: no longer"),
    ],
)
def test_an_engine_that_hangs_is_said_to(tmp_path: Path, step_s: float, want: tuple[int, int, int]) -> None:
    """While it does: once the step is over, all is well again. One that waits for work doesn't hang."""
    engine = ScriptedEngine(saying("hello"), paced=True)

    async def scene(each: Bench) -> None:
        assert each.replica.in_step_s == 0.0, "who waits for work is at no step, for however long"
        assert await statuses(each) == (200, 200, 200)
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        await each.until("it is at this step for long", lambda: each.replica.in_step_s > 2 * 0.02)
        assert await statuses(each) == want
        if want[0] != 200:
            assert (await asked(each, "/healthz"))[1] == HANGS.encode()
        engine.free_running()
        await answering
        await each.until("no step is under way", lambda: each.replica.in_step_s == 0.0)
        assert await statuses(each) == (200, 200, 200)

    play(tmp_path, engine, scene, probes=build_probes(step_s))


def test_a_restore_says_how_far_it_is(tmp_path: Path) -> None:
    """By the stages that are over, as they end; alive from the first moment, ready at the end."""
    goes_on, said = threading.Event(), threading.Event()

    async def scene(each: Bench) -> None:
        whole = each.replica._work.restore

        def slow(request: Bind, wiring: Wiring) -> Served:
            wiring.on_stage(Span(Stage.LEASED, 7))
            said.set()
            assert goes_on.wait(DEADLINE_S)
            return whole(request, wiring)

        each.replica._work = replace(each.replica._work, restore=slow)
        assert await statuses(each) == (200, 503, 503)
        binding = asyncio.create_task(each.replica.bind(BIND))
        await asyncio.to_thread(said.wait, DEADLINE_S)
        status, raw = await asked(each, "/readyz")
        report = decode(raw, RuntimeReport)
        assert (status, report.state, report.spans) == (503, RuntimeState.RESTORING, (Span(Stage.LEASED, 7),))
        assert (await asked(each, "/healthz"))[0] == 200
        goes_on.set()
        await binding
        status, raw = await asked(each, "/readyz")
        assert status == 200
        assert [span.stage for span in decode(raw, RuntimeReport).spans] == ["leased", "bound", "ready"]

    play(tmp_path, ScriptedEngine(saying("x")), scene, bound=False, probes=build_probes(NEVER_S))


def test_who_drains_lives_and_is_not_ready(tmp_path: Path) -> None:
    """So that nothing new comes and nobody ends it, until what is there is over."""
    engine = ScriptedEngine(saying("hello"), paced=True)

    async def scene(each: Bench) -> None:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        each.replica.drain()
        assert await statuses(each) == (200, 503, 503)
        engine.free_running()
        await answering
        await each.until("it may end", each.replica.over.is_set)

    play(tmp_path, engine, scene, probes=build_probes(NEVER_S))


def test_activators_of_a_pod_are_elsewhere(tmp_path: Path) -> None:
    """Their spools can't be seen here, and they live: no orphan's record is written. An answer names this life."""

    async def scene(each: Bench) -> None:
        async with each.open(source="activator-elsewhere") as answer:
            assert answer.headers["x-kelvin-runtime"] == "x"
            await answer.read()
        assert each.orphans._is_alive("activator-elsewhere")
        assert not each.orphans._is_alive("activator-unheard"), (
            "the control: whose spool is not here, and who never asked"
        )
        assert each.records.records == []

    play(tmp_path, ScriptedEngine(saying("x")), scene, probes=build_probes(NEVER_S))


@pytest.mark.parametrize("hangs", [True, False])
def test_a_drain_waits_for_no_engine_that_hangs(tmp_path: Path, hangs: bool) -> None:
    """What is under way ends with an error at once. The control: a step that may last is waited for."""
    engine = ScriptedEngine(saying("hello"), paced=True)
    settings = RuntimeSettings(tmp_path, None, drain_s=3600, restore_s=1.0, step_s=0.0 if hangs else NEVER_S)

    async def scene(each: Bench) -> None:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        await each.until("its answer has begun", lambda: each.meter.meter.requests == 1)
        stop = asyncio.Event()
        stop.set()
        draining = asyncio.create_task(_drain_with(stop, each.replica, settings))
        await each.until("it drains", lambda: each.replica.state is RuntimeState.DRAINING)
        if hangs:
            await asyncio.wait_for(draining, DEADLINE_S)
            assert (await answering)[-1].kind is FrameKind.FAILED
        else:
            assert not draining.done()
            engine.free_running()
            assert (await answering)[-1].kind is FrameKind.END
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    play(tmp_path, engine, scene, probes=build_probes(NEVER_S))
