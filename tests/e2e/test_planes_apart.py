"""A control plane that is killed and stays down, and an activator that dies as well: ready models serve, and the bill
balances when there is one again.
"""

import contextlib
import json
import signal
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

from coldstart_bench.installation import Installation, running
from tests.e2e.calls import Answer, post
from tests.e2e.commands import run
from tests.e2e.conftest import SETTINGS
from tests.e2e.inside import is_recorded
from tests.e2e.processes import services

pytestmark = pytest.mark.deep

CONTROL = "tests.e2e.held_control"
BODY = {"model": "llama", "prompt": "w1 w2", "max_tokens": 3, "temperature": 0}


def _kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(10)


def _alone(kelvin: Installation) -> None:
    """No control plane from now on, and another activator."""
    (kelvin.data / "hold_control").touch()
    found = services(kelvin)
    _kill(found[CONTROL])
    _kill(found["activator"])


def _until(kelvin: Installation, status: int) -> Answer:
    """Ask until it is answered so; the door may be between two activators."""
    answers: list[Answer] = []

    def is_so() -> bool:
        with contextlib.suppress(OSError, HTTPException):
            answers.append(post(kelvin, "/v1/completions", BODY))
        return bool(answers) and answers[-1].status == status

    kelvin.wait(is_so, f"a completion is answered with {status}")
    return answers[-1]


def _kept(kelvin: Installation, what: bytes) -> bool:
    path = kelvin.data / "run" / "feed"
    return path.exists() and what in path.read_bytes()


def test_ready_models_serve_without_a_control_plane(scratch: Path, llama: Path) -> None:
    """Every answer is recorded and billed once, later. Negative control: without what was kept, nobody is let in."""
    with running(scratch / "apart", settings=SETTINGS, program=CONTROL) as kelvin:
        kelvin.push(llama, "llama")
        kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", {"min": 1, "max": 1})
        answers = [_until(kelvin, 200)]
        kelvin.wait(lambda: _kept(kelvin, b'"address":"rt-'), "the feed that is kept names the replica")
        _alone(kelvin)
        answers.append(_until(kelvin, 200))
        answers += [post(kelvin, "/v1/completions", BODY) for _ in range(8)]
        assert [answer.status for answer in answers] == [200] * 10
        assert len({answer.json["choices"][0]["text"] for answer in answers}) == 1
        (kelvin.data / "hold_control").unlink()
        for answer in answers:
            name = answer.headers["x-request-id"]
            kelvin.wait(lambda name=name: is_recorded(kelvin, name), "it is recorded")  # type: ignore[misc]
        _alone(kelvin)
        (kelvin.data / "run" / "feed").unlink()
        assert _until(kelvin, 503).json["error"]["code"] == "unavailable"
        (kelvin.data / "hold_control").unlink()
        last = _until(kelvin, 200).headers["x-request-id"]
        kelvin.wait(lambda: is_recorded(kelvin, last), "it is recorded")
        kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", {"min": 0, "max": 1})
        kelvin.to_zero("llama")
        month = time.strftime("%Y-%m", time.gmtime())

        def report() -> Any:
            return json.loads(
                run(kelvin, "billing", "report", "--tenant", "default", "--month", month, "--format", "json")
            )

        kelvin.wait(lambda: not report()["open_runtimes"], "the replica's life is recorded")
        assert report()["balance"]["problems"] == []
        assert report()["requests"] == {"ok": 11}
        assert json.loads(run(kelvin, "billing", "reconcile", "--json"))["differences"] == []
