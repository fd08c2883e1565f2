"""The control routes: strict bodies, facts as answers, failures as problem details with their own status."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from contracts.artifact_errors import ChunkCorrupt
from contracts.jobs import Bound, RuntimeReport, RuntimeState
from contracts.wire import decode, encode
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import BIND, Bench, saying
from tests.runtime.scenes import play


async def _call(each: Bench, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, bytes]:
    async with each.session.request(method, f"http://rt{path}", data=body) as answer:
        return answer.status, answer.content_type, await answer.read()


def test_bind_turns_a_standby_ready(tmp_path: Path) -> None:
    """Health is always, readiness only then; the state says the same."""

    async def scene(each: Bench) -> None:
        assert (await _call(each, "GET", "/healthz"))[0] == 200
        assert (await _call(each, "GET", "/readyz"))[0] == 503
        status, kind, raw = await _call(each, "POST", "/control/bind", encode(BIND))
        assert (status, kind) == (200, "application/json")
        assert decode(raw, Bound).runtime_id == "x"
        assert (await _call(each, "GET", "/readyz"))[0] == 200
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.model, report.max_streams) == (RuntimeState.READY, "m", 8)
        assert report.kv_blocks_free == report.kv_blocks_total > 0
        assert report.open_files > 3

    play(tmp_path, ScriptedEngine(saying("x")), scene, bound=False)


def test_sleep_and_wake(tmp_path: Path) -> None:
    """Asleep it is not ready, and says so; a wake is answered as a bind is. Only who sleeps drops its weights."""

    async def scene(each: Bench) -> None:
        assert (await _call(each, "POST", "/control/sleep"))[0] == 204
        assert (await _call(each, "GET", "/readyz"))[0] == 503
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.leases) == (RuntimeState.ASLEEP, 1)
        assert (await _call(each, "POST", "/control/sleep"))[0] == 409
        status, _, raw = await _call(each, "POST", "/control/wake", encode(BIND))
        assert status == 200
        assert decode(raw, Bound).runtime_id == "x"
        assert (await _call(each, "POST", "/control/wake", encode(BIND)))[0] == 409
        assert (await _call(each, "POST", "/control/drop"))[0] == 409
        assert (await _call(each, "POST", "/control/sleep"))[0] == 204
        assert (await _call(each, "POST", "/control/drop"))[0] == 204
        report = decode((await _call(each, "GET", "/control/state"))[2], RuntimeReport)
        assert (report.state, report.leases) == (RuntimeState.ASLEEP2, 0)
        assert (await _call(each, "POST", "/control/drop"))[0] == 409
        assert (await _call(each, "POST", "/control/wake", encode(BIND)))[0] == 200
        assert len(await each.frames()) > 1

    play(tmp_path, ScriptedEngine(saying("x")), scene)


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
def test_wrong_calls_are_problems(
    tmp_path: Path, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    """RFC 9457, with code and status; the standby is as before."""

    async def scene(each: Bench) -> None:
        got, kind, raw = await _call(each, method, path, body)
        assert (got, kind) == (status, "application/problem+json")
        assert json.loads(raw)["code"] == code
        assert each.replica.state is RuntimeState.STANDBY

    play(tmp_path, ScriptedEngine(saying("x")), scene, bound=False)


def test_a_restore_that_fails_says_why_and_ends(tmp_path: Path) -> None:
    """The failure of the weight cache keeps its code; afterwards the process may end."""

    async def scene(each: Bench) -> None:
        status, _, raw = await _call(each, "POST", "/control/bind", encode(BIND))
        assert (status, json.loads(raw)["code"]) == (500, "chunk_corrupt")
        async with asyncio.timeout(30):
            await each.replica.over.wait()
        assert (await _call(each, "GET", "/readyz"))[0] == 503

    failure = ChunkCorrupt("ab", "nvme")
    play(tmp_path, ScriptedEngine(saying("x")), scene, bound=False, failure=failure)
