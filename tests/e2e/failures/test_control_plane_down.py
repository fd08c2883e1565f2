"""A control plane that is killed and stays down, and an activator that dies as well: ready models serve, one at zero is
woken, and the bill balances when there is one again.
"""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.e2e.commands import run
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import Answer, post
from tests.e2e.installation_processes import IMPORTS_TESTS, services
from tests.e2e.installation_state import is_recorded, replicas, rows

pytestmark = pytest.mark.deep

CONTROL = "tests.e2e.failures.held_control"
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


def _lives(kelvin: Installation) -> set[str]:
    """Runtimes of `llama` whose lives are recorded."""
    found = rows(kelvin, "SELECT runtime_id FROM ledger_lifetimes WHERE model = 'llama'")
    return {runtime_id for (runtime_id,) in found}


def _served(kelvin: Installation) -> int:
    """Requests that went well, as recorded."""
    return len(rows(kelvin, "SELECT 1 FROM ledger_requests WHERE outcome = 'ok'"))


def _balanced(kelvin: Installation) -> None:
    """All lives are in the month's report, and nothing in it disagrees."""
    month = time.strftime("%Y-%m", time.gmtime())

    def report() -> Any:
        return json.loads(run(kelvin, "billing", "report", "--tenant", "default", "--month", month, "--format", "json"))

    kelvin.wait(lambda: not report()["open_runtimes"], "the replica's life is recorded")
    assert report()["balance"]["problems"] == []
    assert json.loads(run(kelvin, "billing", "reconcile", "--json"))["differences"] == []


@pytest.fixture(scope="module")
def kelvin(scratch: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    """With two models at zero, and room for one replica."""
    settings = {**SETTINGS, **IMPORTS_TESTS, "KELVIN_DEVICE_SLOTS": "1"}
    with running_installation(scratch / "apart", settings=settings, program=CONTROL) as installation:
        installation.push(llama, "llama")
        installation.push(qwen2, "other")
        yield installation


@pytest.fixture(autouse=True)
def balanced(kelvin: Installation) -> Iterator[None]:
    """After each of them, too."""
    kelvin.wait(lambda: _kept(kelvin, kelvin.model("other")["version"].encode()), "the feed that is kept names both")
    yield
    kelvin.to_zero("llama")
    _balanced(kelvin)


def _recorded(kelvin: Installation, answers: list[Answer]) -> None:
    for answer in answers:
        name = answer.headers["x-request-id"]
        kelvin.wait(lambda name=name: is_recorded(kelvin, name), "it is recorded")  # type: ignore[misc]


def test_ready_models_serve_without_a_control_plane(kelvin: Installation) -> None:
    """Every answer is recorded and billed once, later. Negative control: without what was kept, nobody is let in."""
    before = _served(kelvin)
    kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", {"min": 1, "max": 1})
    answers = [_until(kelvin, 200)]
    kelvin.wait(lambda: _kept(kelvin, b'"address":"rt-'), "the feed that is kept names the replica")
    _alone(kelvin)
    answers.append(_until(kelvin, 200))
    answers += [post(kelvin, "/v1/completions", BODY) for _ in range(8)]
    assert [answer.status for answer in answers] == [200] * 10
    assert len({answer.json["choices"][0]["text"] for answer in answers}) == 1
    (kelvin.data / "hold_control").unlink()
    _recorded(kelvin, answers)
    _alone(kelvin)
    (kelvin.data / "run" / "feed").unlink()
    assert _until(kelvin, 503).json["error"]["code"] == "unavailable"
    (kelvin.data / "hold_control").unlink()
    _recorded(kelvin, [_until(kelvin, 200)])
    kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", {"min": 0, "max": 1})
    kelvin.wait(lambda: _served(kelvin) == before + 11, "each is recorded once")


def test_a_version_at_zero_wakes_without_a_control_plane(kelvin: Installation) -> None:
    """On the standby that is parked, once, within the slots: there is room for one. The next control plane adopts it:
    nothing is started again, and its life and every request are on the bill.
    """
    kelvin.to_zero("llama")
    before, lives = _served(kelvin), _lives(kelvin)
    _alone(kelvin)
    answers = [_until(kelvin, 200), *(post(kelvin, "/v1/completions", BODY) for _ in range(3))]
    assert [answer.status for answer in answers] == [200] * 4
    late = {**BODY, "model": "other"}
    assert post(kelvin, "/v1/completions", late, x_kelvin_deadline_ms="1500").status in (503, 504)
    (kelvin.data / "hold_control").unlink()
    _recorded(kelvin, answers)
    (adopted,) = replicas(kelvin, "llama")
    assert adopted["state"] == "ready"
    assert post(kelvin, "/v1/completions", BODY).status == 200
    kelvin.to_zero("llama")
    kelvin.wait(lambda: _lives(kelvin) - lives == {adopted["runtime_id"]}, "one more life is recorded")
    kelvin.wait(lambda: _served(kelvin) == before + 5, "each is recorded once")
