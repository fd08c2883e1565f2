"""A killed control plane that stays down, and an activator that dies too: models serve and start, and the bill
balances."""

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
    """Kill the control plane for good, and the activator, which is replaced."""
    (kelvin.data / "hold_control").touch()
    found = services(kelvin)
    _kill(found[CONTROL])
    _kill(found["activator"])


def _until(kelvin: Installation, status: int) -> Answer:
    """Send a request until it is answered with this status. Connections may fail while the activator is replaced."""
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
    """Return the runtimes of `llama` with a recorded lifetime."""
    found = rows(kelvin, "SELECT runtime_id FROM ledger_lifetimes WHERE model = 'llama'")
    return {runtime_id for (runtime_id,) in found}


def _served(kelvin: Installation) -> int:
    """Return the number of successful requests in the ledger."""
    return len(rows(kelvin, "SELECT 1 FROM ledger_requests WHERE outcome = 'ok'"))


def _balanced(kelvin: Installation) -> None:
    """Assert that the month's report has all lifetimes and no differences."""
    month = time.strftime("%Y-%m", time.gmtime())

    def report() -> Any:
        return json.loads(run(kelvin, "billing", "report", "--tenant", "default", "--month", month, "--format", "json"))

    kelvin.wait(lambda: not report()["open_runtimes"], "the replica's life is recorded")
    assert report()["balance"]["problems"] == []
    assert json.loads(run(kelvin, "billing", "reconcile", "--json"))["differences"] == []


@pytest.fixture(scope="module")
def kelvin(scratch: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    """An installation with two models at zero and one device slot."""
    settings = {**SETTINGS, **IMPORTS_TESTS, "KELVIN_DEVICE_SLOTS": "1"}
    with running_installation(scratch / "apart", settings=settings, program=CONTROL) as installation:
        installation.push(llama, "llama")
        installation.push(qwen2, "other")
        yield installation


@pytest.fixture(autouse=True)
def balanced(kelvin: Installation) -> Iterator[None]:
    """Check before each test that the feed is on disk, and after it that the books balance."""
    kelvin.wait(lambda: _kept(kelvin, kelvin.model("other")["version"].encode()), "the feed that is kept names both")
    yield
    kelvin.scale_to_zero("llama")
    _balanced(kelvin)


def _recorded(kelvin: Installation, answers: list[Answer]) -> None:
    for answer in answers:
        name = answer.headers["x-request-id"]
        kelvin.wait(lambda name=name: is_recorded(kelvin, name), "it is recorded")  # type: ignore[misc]


def test_ready_models_serve_without_a_control_plane(kelvin: Installation) -> None:
    """A ready model answers from the feed on disk, and each request is billed once later.
    Negative control: without that feed, requests are refused.
    """
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
    """A model at zero starts once on the parked standby, and a second model gets no slot.
    The next control plane adopts the replica, and its lifetime and requests are billed.
    """
    kelvin.scale_to_zero("llama")
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
    kelvin.scale_to_zero("llama")
    kelvin.wait(lambda: _lives(kelvin) - lives == {adopted["runtime_id"]}, "one more life is recorded")
    kelvin.wait(lambda: _served(kelvin) == before + 5, "each is recorded once")
