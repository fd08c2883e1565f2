"""One request can be followed through the logs of all processes that handled it."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from kelvin.supervisor.log_rotation import LIMIT_BYTES, ROTATION_INTERVAL_S, SUFFIX
from tests.e2e.https_client import complete, post
from tests.e2e.installation_state import log_lines
from tests.e2e.tiny_models import prompt_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _speakers(lines: Iterable[dict[str, Any]], request_id: str) -> set[str]:
    """Return the processes with a log line of the request; runtimes without their ids."""
    return {line["process"].partition("-")[0] for line in lines if line.get("request_id") == request_id}


def _endings(lines: Iterable[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """Return the log lines of the request's end."""
    return [line for line in lines if line.get("request_id") == request_id and line["message"] == "a request ended"]


def test_a_cold_start_is_followed_by_its_request_id(kelvin: Installation) -> None:
    """Activator, control plane, runtime and cache agent log a cold request's id. A warm request leaves no line."""
    kelvin.scale_to_zero("llama")
    cold = complete(kelvin, "llama", prompt_of([5, 9]), max_tokens=2, stream=True)
    warm = complete(kelvin, "llama", prompt_of([5, 9]), max_tokens=2)
    assert (cold.status, warm.status) == (200, 200)
    request_id = cold.headers["x-request-id"]
    everyone = {"activator", "controlplane", "runtime", "weightcache"}
    kelvin.wait(lambda: _speakers(log_lines(kelvin), request_id) == everyone, "all have written")
    kelvin.wait(lambda: bool(_endings(log_lines(kelvin), request_id)), "its end, too")
    lines = log_lines(kelvin)
    assert _speakers(lines, warm.headers["x-request-id"]) == set()
    (end,) = _endings(lines, request_id)
    assert (end["outcome"], end["status"], end["cold"], end["tenant"]) == ("ok", 200, True, "default")
    # Negative control: without request ids, the search finds nothing.
    mute = [{name: value for name, value in line.items() if name != "request_id"} for line in lines]
    assert _speakers(mute, request_id) == set()


def test_the_callers_trace_stands_beside_it(kelvin: Installation) -> None:
    """The client's trace id is logged beside the request id, by activator, control plane and runtime."""
    kelvin.scale_to_zero("llama")
    body = {"model": "llama", "prompt": prompt_of([5]), "max_tokens": 1}
    answer = post(kelvin, "/v1/completions", body, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    assert answer.status == 200

    def is_traced() -> bool:
        mine = [line for line in log_lines(kelvin) if line.get("request_id") == answer.headers["x-request-id"]]
        traced = {line["process"].partition("-")[0] for line in mine if line.get("trace_id") == TRACE}
        return traced == {"activator", "controlplane", "runtime"}

    kelvin.wait(is_traced, "all have written")


@pytest.mark.deep
def test_large_log_is_rotated_while_the_installation_runs(kelvin: Installation) -> None:
    """`kelvin up` rotates a log above the limit. One at the limit stays (control)."""
    logs = kelvin.data / "logs"
    large, small, older = logs / "large.log", logs / "small.log", logs / f"large.log{SUFFIX}"
    try:
        for path, size in ((large, LIMIT_BYTES + 1), (small, LIMIT_BYTES)):
            path.touch()
            os.truncate(path, size)
        kelvin.wait(lambda: older.exists() and large.stat().st_size == 0, "it is rotated", 2 * ROTATION_INTERVAL_S)
        assert older.stat().st_size == LIMIT_BYTES + 1
        assert small.stat().st_size == LIMIT_BYTES
    finally:
        for path in (large, small, older):
            path.unlink(missing_ok=True)
