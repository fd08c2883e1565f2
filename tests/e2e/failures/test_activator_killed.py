"""An activator is killed at each point between a response's last frame and its receipt: the bill stays right."""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from kelvin.contracts.accounting.usage import ACK_TOKENS
from tests.e2e.conftest import SETTINGS
from tests.e2e.failures.held_activator import POINTS
from tests.e2e.https_client import Answer, complete, connect, headers
from tests.e2e.installation_processes import IMPORTS_TESTS, services
from tests.e2e.installation_state import is_recorded, reconciled, sole_replica
from tests.e2e.tiny_models import words_of

pytestmark = pytest.mark.deep

HELD = "tests.e2e.failures.held_activator"
TOKENS = 100  # more than one acknowledgement covers, and not a multiple of it


@pytest.fixture(scope="module")
def held(scratch: Path, llama: Path) -> Iterator[Installation]:
    """An installation whose activator stops at a chosen point."""
    with running_installation(scratch / "held", settings=SETTINGS | IMPORTS_TESTS, program=HELD) as installation:
        installation.push(llama, "llama")
        _recorded(installation, complete(installation, "llama", "w1", max_tokens=1))
        yield installation


def _recorded(kelvin: Installation, answer: Answer) -> None:
    """Wait until the request, and thus every earlier one, is in the ledger."""
    request_id = answer.headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, request_id), "it is recorded")


def _activator(kelvin: Installation) -> psutil.Process:
    return services(kelvin)[HELD]


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read()
    except http.client.IncompleteRead as cut:
        return cut.partial


def _talkative(kelvin: Installation) -> str:
    """Return a prompt whose greedy answer has all TOKENS tokens, once it is recorded."""
    for prompt in (f"w{number} w{number + 1}" for number in range(1, 60)):
        answer = complete(kelvin, "llama", prompt, max_tokens=TOKENS)
        if answer.json["usage"]["completion_tokens"] == TOKENS:
            _recorded(kelvin, answer)
            return prompt
    raise AssertionError("every answer ends early")


def _cut_off(kelvin: Installation, point: str, prompt: str, *, stream: bool, also: int | None = None) -> bytes:
    """Send a request, kill the activator at the point, and return the bytes that the client received.

    The process `also` is killed first.
    """
    before = _activator(kelvin)
    body = {"model": "llama", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    (kelvin.data / "hold").write_text(point)
    connection = connect(kelvin)
    connection.request("POST", "/v1/completions", json.dumps(body), headers(kelvin))
    kelvin.wait(lambda: before.status() == psutil.STATUS_STOPPED, f"the activator stopped at '{point}'")
    for pid in (before.pid,) if also is None else (also, before.pid):
        os.kill(pid, signal.SIGKILL)
    try:
        return _read(connection.getresponse())
    except http.client.RemoteDisconnected:  # a whole answer is sent only after its record
        return b""
    finally:
        connection.close()


def _report(kelvin: Installation) -> Any:
    """Return this month's report once an activator answers."""
    found: list[Any] = []

    def answers() -> bool:
        connection = connect(kelvin)
        try:
            path = time.strftime("/admin/v1/billing/report?month=%Y-%m", time.gmtime())
            connection.request("GET", path, headers=headers(kelvin, "admin.key"))
            answer = connection.getresponse()
            found[:] = [json.loads(answer.read())] if answer.status == 200 else []
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return bool(found)

    kelvin.wait(answers, "the bill can be asked for")
    return found[0]


def _charged(kelvin: Installation, point: str, before: Any) -> int:
    """Return the tokens of the one request that is newly on the bill."""

    def is_there() -> bool:
        return bool(sum(_report(kelvin)["requests"].values()) == sum(before["requests"].values()) + 1)

    kelvin.wait(is_there, f"the request of '{point}' is recorded")
    tokens: int = _report(kelvin)["completion_tokens"] - before["completion_tokens"]
    return tokens


def test_at_every_point_the_bill_is_the_clients_own_count(held: Installation) -> None:
    """At every point there is one record, and it charges what the client received.

    An activator that dies at "end read" leaves up to 64 tokens uncharged. If its replica dies too, reconcile names it.
    """
    prompt = _talkative(held)
    for point in POINTS:
        before = _report(held)
        counted = words_of(_cut_off(held, point, prompt, stream=True).decode())
        assert counted == TOKENS, point
        short = ACK_TOKENS if point == "end read" else 0
        assert counted - short <= _charged(held, point, before) <= counted, point
    before = _report(held)
    _cut_off(held, "end read", prompt, stream=False)
    assert _charged(held, "a whole answer", before) == 0, "the client has no whole answer"
    held.scale_to_zero("llama")
    held.wait(lambda: not _report(held)["open_runtimes"], "the replica's life is recorded")
    assert _report(held)["balance"]["problems"] == []
    known = reconciled(held, 0)["differences"]
    assert {each["kind"] for each in known} == {"charged_by_receipt"}
    assert all(each["tokens"] == ACK_TOKENS and each["amount_micros"] > 0 for each in known)

    _leaves_a_named_difference(held)  # last, because the books have a difference from here on


def _leaves_a_named_difference(unbalanced: Installation) -> None:
    """An activator and its replica die, so the request has no record: reconcile names the replica and the value."""
    _recorded(unbalanced, complete(unbalanced, "llama", "w1", max_tokens=1))
    replica = sole_replica(unbalanced, "llama")
    _cut_off(unbalanced, "end read", "w1 w2", stream=True, also=replica["pid"])
    life = replica["runtime_id"]

    def is_named() -> bool:
        return life in [each["subject"] for each in _report(unbalanced)["balance"]["problems"]]

    unbalanced.wait(is_named, "the replica's life is recorded")
    (found,) = [each for each in reconciled(unbalanced, 2)["differences"] if each["subject"] == life]
    assert (found["kind"], found["requests"]) == ("requests_missing", 1)
    assert "SIGKILL" in found["cause"]
    assert found["tokens"] > 0
    assert found["amount_micros"] > 0
