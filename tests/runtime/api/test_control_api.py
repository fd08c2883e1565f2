"""Control routes, probes and the bind of parked pods, on a scripted engine.

Control routes are strict: failures are problem details with their own status.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.artifacts.runtime_control import (
    BindPodRequest,
    BindRequest,
    BindResponse,
    ParkedSpec,
    RuntimeReport,
    RuntimeState,
)
from kelvin.contracts.errors import Conflict, Refused, Unavailable
from kelvin.contracts.serving.stream_frames import FrameKind
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.traffic_errors import DeadlineExceeded
from kelvin.contracts.wire import decode, encode
from runtime.api.control_api import ENGINE_HANGS, BindHandler, build_probe_app
from runtime.app.app import _drain_on_stop
from runtime.app.settings import RuntimeSettings
from runtime.lifecycle.replica import RuntimeReplica
from runtime.surface.served_version import EngineCallbacks, ServedVersion
from tests.runtime.fakes import BIND, DEADLINE_S, ReplicaServer, fake_work, replica_of, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine


async def _call(each: ReplicaServer, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, bytes]:
    async with each.session.request(method, f"http://rt{path}", data=body) as answer:
        return answer.status, answer.content_type, await answer.read()


async def test_bind_turns_a_standby_ready(tmp_path: Path) -> None:
    """A standby is healthy from the start, and ready once bound. Its report says the same."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x")), bound=False) as each:
        assert (await _call(each, "GET", "/healthz"))[0] == 200
        assert (await _call(each, "GET", "/readyz"))[0] == 503
        status, kind, raw = await _call(each, "POST", "/control/bind", encode(BIND))
        assert (status, kind) == (200, "application/json")
        assert decode(raw, BindResponse).runtime_id == "x"
        assert (await _call(each, "GET", "/readyz"))[0] == 200
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.model, report.max_streams) == (RuntimeState.READY, "m", 8)
        assert report.kv_blocks_free == report.kv_blocks_total > 0
        assert report.open_files > 3


async def test_sleeping_replica_is_not_ready_until_woken(tmp_path: Path) -> None:
    """A sleeping replica is not ready until a wake, answered like a bind. Only a sleeping one drops weights."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x"))) as each:
        assert (await _call(each, "POST", "/control/sleep"))[0] == 204
        assert (await _call(each, "GET", "/readyz"))[0] == 503
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.leases) == (RuntimeState.ASLEEP, 1)
        assert (await _call(each, "POST", "/control/sleep"))[0] == 409
        status, _, raw = await _call(each, "POST", "/control/wake", encode(BIND))
        assert status == 200
        assert decode(raw, BindResponse).runtime_id == "x"
        assert (await _call(each, "POST", "/control/wake", encode(BIND)))[0] == 409
        assert (await _call(each, "POST", "/control/drop"))[0] == 409
        assert (await _call(each, "POST", "/control/sleep"))[0] == 204
        assert (await _call(each, "POST", "/control/drop"))[0] == 204
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.leases) == (RuntimeState.DEEP_SLEEP, 0)
        assert (await _call(each, "POST", "/control/drop"))[0] == 409
        assert (await _call(each, "POST", "/control/wake", encode(BIND)))[0] == 200
        assert len(await each.frames()) > 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        pytest.param("POST", "/control/bind", b"{}", 400, "invalid_request", id="a field is missing"),
        pytest.param(
            "POST", "/control/seal", b'{"tenant":"a","version":"v","x":1}', 400, "invalid_request", id="one more"
        ),
        pytest.param("POST", "/control/gate", b"[", 400, "invalid_request", id="no JSON"),
        pytest.param("GET", "/control/bind", None, 405, "method_not_allowed", id="the wrong method"),
        pytest.param("GET", "/control/nothing", None, 404, "not_found", id="an unknown route"),
        pytest.param("GET", "/docs", None, 404, "not_found", id="no pages for people"),
    ],
)
async def test_wrong_calls_are_problems(
    tmp_path: Path, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    """A wrong call gets RFC 9457 problem details, and the standby does not change."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x")), bound=False) as each:
        got, kind, raw = await _call(each, method, path, body)
        assert (got, kind) == (status, "application/problem+json")
        assert json.loads(raw)["code"] == code
        assert each.replica.state is RuntimeState.STANDBY


async def test_failed_restore_reports_its_reason(tmp_path: Path) -> None:
    """The weight cache's failure keeps its code, and the process may exit."""
    failure = ChunkCorrupt("ab", "nvme")
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x")), bound=False, failure=failure) as each:
        status, _, raw = await _call(each, "POST", "/control/bind", encode(BIND))
        assert (status, json.loads(raw)["code"]) == (500, "chunk_corrupt")
        async with asyncio.timeout(30):
            await each.replica.may_exit.wait()
        assert (await _call(each, "GET", "/readyz"))[0] == 503


STEP_S = 0.2


async def test_hung_engine_ends_its_replica(tmp_path: Path) -> None:
    """An engine that hangs fails its requests, and the process may exit."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    async with serve_replica(tmp_path, engine, step_s=STEP_S) as each:
        answering = asyncio.create_task(each.frames())
        async with asyncio.timeout(DEADLINE_S):
            await each.replica.may_exit.wait()
        assert each.replica.failure == Unavailable("this replica")
        assert each.replica.state is RuntimeState.FAILED
        assert (await answering)[-1].kind is FrameKind.FAILED
        engine.run_freely()


async def test_slow_engine_that_moves_on_by_layers_is_not_hung(tmp_path: Path) -> None:
    """A long step that progresses by layers is not hung (the control). `test_engine.py` tests the progress of real
    engines."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    engine.reports_progress = True
    async with serve_replica(tmp_path, engine, step_s=STEP_S) as each:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        long_s = time.monotonic() + 8 * STEP_S
        await each.until("its step has lasted for long", lambda: time.monotonic() > long_s)
        assert each.replica.failure is None
        engine.run_freely()
        assert (await answering)[-1].kind is FrameKind.END


QUEUE = {"K-Network-Probe": "queue"}
NEVER_S = 3600.0  # no step is that long


async def fetch_path(each: ReplicaServer, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    async with each.session.get(f"http://rt{path}", headers=headers) as answer:
        return answer.status, await answer.read()


async def statuses(each: ReplicaServer) -> tuple[int, int, int]:
    """Return the statuses of the health probe, the readiness probe and the probe of Knative's activator."""
    found = [
        await fetch_path(each, "/healthz"),
        await fetch_path(each, "/readyz"),
        await fetch_path(each, "/healthz", QUEUE),
    ]
    return found[0][0], found[1][0], found[2][0]


@pytest.mark.parametrize(
    ("step_s", "want"),
    [
        pytest.param(0.02, (503, 503, 503), id="a step above the limit"),
        pytest.param(NEVER_S, (200, 200, 200), id="control: a step within the limit"),
    ],
)
async def test_hung_engine_fails_its_health_probe(tmp_path: Path, step_s: float, want: tuple[int, int, int]) -> None:
    """The probe fails while a step hangs and recovers after it. An engine without work does not hang."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    async with serve_replica(tmp_path, engine, probes=build_probe_app(step_s)) as each:
        assert each.replica.stalled_s == 0.0, "an engine without work is at no step"
        assert await statuses(each) == (200, 200, 200)
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        await each.until("it is at this step for long", lambda: each.replica.stalled_s > 2 * 0.02)
        assert await statuses(each) == want
        if want[0] != 200:
            assert (await fetch_path(each, "/healthz"))[1] == ENGINE_HANGS.encode()
        engine.run_freely()
        await answering
        await each.until("no step is under way", lambda: each.replica.stalled_s == 0.0)
        assert await statuses(each) == (200, 200, 200)


async def test_report_shows_the_stages_of_a_restore(tmp_path: Path) -> None:
    """The readiness probe reports finished stages during a restore. The process is alive all the time."""
    goes_on, said = threading.Event(), threading.Event()
    async with serve_replica(
        tmp_path, ScriptedEngine(script_of("x")), bound=False, probes=build_probe_app(NEVER_S)
    ) as each:
        whole = each.replica._operations.restore

        def slow(request: BindRequest, callbacks: EngineCallbacks) -> ServedVersion:
            callbacks.on_stage(StageSpan(Stage.LEASED, 7))
            said.set()
            assert goes_on.wait(DEADLINE_S)
            return whole(request, callbacks)

        each.replica._operations = replace(each.replica._operations, restore=slow)
        assert await statuses(each) == (200, 503, 503)
        binding = asyncio.create_task(each.replica.bind(BIND))
        await asyncio.to_thread(said.wait, DEADLINE_S)
        status, raw = await fetch_path(each, "/readyz")
        report = decode(raw, RuntimeReport)
        assert (status, report.state, report.spans) == (503, RuntimeState.RESTORING, (StageSpan(Stage.LEASED, 7),))
        assert (await fetch_path(each, "/healthz"))[0] == 200
        goes_on.set()
        await binding
        status, raw = await fetch_path(each, "/readyz")
        assert status == 200
        assert [span.stage for span in decode(raw, RuntimeReport).spans] == ["leased", "bound", "ready"]


async def test_draining_replica_is_alive_and_not_ready(tmp_path: Path) -> None:
    """A draining replica is not ready, but alive until its requests end."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    async with serve_replica(tmp_path, engine, probes=build_probe_app(NEVER_S)) as each:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        each.replica.drain()
        assert await statuses(each) == (200, 503, 503)
        engine.run_freely()
        await answering
        await each.until("it may end", each.replica.may_exit.is_set)


async def test_activators_of_a_pod_are_remote(tmp_path: Path) -> None:
    """An activator of another host counts as alive, so no orphan record is written. The answer names the runtime."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of("x")), probes=build_probe_app(NEVER_S)) as each:
        async with each.open(source="activator-elsewhere") as answer:
            assert answer.headers["x-kelvin-runtime"] == "x"
            await answer.read()
        assert each.orphans._is_alive("activator-elsewhere")
        assert not each.orphans._is_alive("activator-unheard"), (
            "control: an activator without a spool here that sent no request"
        )
        assert each.records.records == []


@pytest.mark.parametrize("hangs", [True, False])
async def test_drain_does_not_wait_for_a_hung_engine(tmp_path: Path, hangs: bool) -> None:
    """With a hung engine a drain fails its requests at once. A step within its limit is waited for (control)."""
    engine = ScriptedEngine(script_of("hello"), paced=True)
    settings = RuntimeSettings(tmp_path, None, drain_s=3600, restore_s=1.0, step_s=0.0 if hangs else NEVER_S)
    async with serve_replica(tmp_path, engine, probes=build_probe_app(NEVER_S)) as each:
        answering = asyncio.create_task(each.frames())
        await asyncio.to_thread(engine.in_step.wait, DEADLINE_S)
        await each.until("its answer has begun", lambda: each.meter.meter.requests == 1)
        stop = asyncio.Event()
        stop.set()
        draining = asyncio.create_task(_drain_on_stop(stop, each.replica, settings))
        await each.until("it drains", lambda: each.replica.state is RuntimeState.DRAINING)
        if hangs:
            await asyncio.wait_for(draining, DEADLINE_S)
            assert (await answering)[-1].kind is FrameKind.FAILED
        else:
            assert not draining.done()
            engine.run_freely()
            assert (await answering)[-1].kind is FrameKind.END
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)


PARKED = ParkedSpec(device_class="cpu-1", threads=1, kv_bytes=1 << 20, store="s3://models/prod")
TAKE = BindPodRequest(
    tenant="acme", model="m", version="ab" * 32, device_class="cpu-1", store="s3://models/prod", weight_bytes=9
)


@asynccontextmanager
async def parked(
    tmp_path: Path, bind_timeout_s: float = DEADLINE_S
) -> AsyncIterator[tuple[BindHandler, RuntimeReplica, threading.Event]]:
    """A parked pod whose restore waits for the event."""
    goes_on, work = threading.Event(), fake_work(ScriptedEngine(script_of("hello")))

    def slow(request: BindRequest, callbacks: EngineCallbacks) -> ServedVersion:
        assert goes_on.wait(DEADLINE_S)
        return work.restore(request, callbacks)

    replica = replica_of(tmp_path, replace(work, restore=slow))
    try:
        yield BindHandler(PARKED, replica, asyncio.Event(), bind_timeout_s), replica, goes_on
    finally:
        goes_on.set()
        await replica.close()


async def test_a_restore_that_hangs_ends(tmp_path: Path) -> None:
    """A restore that hangs fails the process with a timeout. A second bind gets the same failure."""
    async with parked(tmp_path, bind_timeout_s=0.05) as (orders, replica, _):
        for _again in range(2):
            with pytest.raises(Refused) as caught:
                await orders.bind(TAKE)
            assert isinstance(caught.value.failure, DeadlineExceeded)
        assert replica.state is RuntimeState.FAILED
        assert replica.may_exit.is_set()


async def test_hung_warm_up_does_not_block_orders(tmp_path: Path) -> None:
    """If the warm-up hangs, a bind fails with a timeout, and so does the process."""
    goes_on = threading.Event()

    def hang() -> None:
        assert goes_on.wait(DEADLINE_S)

    replica = replica_of(tmp_path, replace(fake_work(ScriptedEngine(script_of("hello"))), warm_up=(hang,)))
    warming = asyncio.create_task(replica.warm_up(0))
    try:
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await BindHandler(PARKED, replica, asyncio.Event(), 0.05).bind(TAKE)
        assert isinstance(caught.value.failure, DeadlineExceeded)
        assert replica.state is RuntimeState.FAILED
        assert replica.may_exit.is_set()
    finally:
        goes_on.set()
        await warming
        await replica.close()


async def test_bind_survives_its_cancelled_caller(tmp_path: Path) -> None:
    """A bind goes on after its caller left. The next equal bind gets its answer, another version a conflict."""
    async with parked(tmp_path) as (orders, replica, goes_on):
        first = asyncio.create_task(orders.bind(TAKE))
        while replica.state is not RuntimeState.RESTORING:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Refused) as caught:
            await orders.bind(msgspec.structs.replace(TAKE, version="cd" * 32))
        assert isinstance(caught.value.failure, Conflict)
        goes_on.set()
        assert (await orders.bind(TAKE)).runtime_id == replica.runtime_id
        assert replica.report().state is RuntimeState.READY
        replica.drain()
        with pytest.raises(Refused) as caught:
            await orders.bind(TAKE)
        assert isinstance(caught.value.failure, Unavailable), "it ends"


async def test_bind_after_a_failure_says_why(tmp_path: Path) -> None:
    """After a failure, a bind that once succeeded is refused with the failure."""
    async with parked(tmp_path) as (orders, replica, goes_on):
        goes_on.set()
        await orders.bind(TAKE)
        replica.fail(Unavailable("the device"))
        with pytest.raises(Refused) as caught:
            await orders.bind(TAKE)
        assert caught.value.failure == Unavailable("the device")
