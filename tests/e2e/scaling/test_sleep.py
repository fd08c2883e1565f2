"""Sleeping replicas at levels 1 and 2: they give up their resources and wake for the next request."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation, InstallationFailed
from kelvin.contracts.artifacts.runtime_control import RuntimeState
from tests.e2e.commands import run
from tests.e2e.https_client import complete
from tests.e2e.installation_processes import services
from tests.e2e.installation_state import cache, replicas, report, rows, sole_replica
from tests.e2e.tiny_models import greedy_continuation, prompt_of, text_of

pytestmark = pytest.mark.deep

PROMPT = [5, 9, 12, 33, 20]


@pytest.fixture
def sleepy(kelvin: Installation) -> Iterator[Installation]:
    """The installation with a `llama` that soon sleeps, and no other replica. Restored afterwards."""
    _others_to_zero(kelvin)
    kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", {"window_s": 6, "grace_s": 0, "idle": "sleep"})
    yield kelvin
    before = {"window_s": 60, "grace_s": 30, "idle": "zero", "wait_price": 10_000, "average": "linear", "backlog_s": 0}
    kelvin.admin.request("PUT", "/admin/v1/models/llama/scale", before)
    kelvin.scale_to_zero("llama")


def _others_to_zero(kelvin: Installation) -> None:
    """Stop the other models, so that they neither take nor free a device slot."""
    for model in kelvin.admin.request("GET", "/admin/v1/models")["models"]:
        if model["model"] != "llama":
            kelvin.scale_to_zero(model["model"])


def _asleep(kelvin: Installation, state: str = "asleep") -> Any:
    """Send a request, wait until the model sleeps, and return its replica."""
    assert complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
    kelvin.wait(lambda: kelvin.model("llama")["state"] == state, f"llama is {state}")
    return sole_replica(kelvin, "llama")


def _life(kelvin: Installation, runtime_id: str) -> tuple[int, int, int]:
    """Return the standby, restore and total microseconds of the replica's life, once recorded."""
    query = "SELECT standby_us, restore_us, total_us FROM ledger_lifetimes WHERE runtime_id = ?"
    kelvin.wait(lambda: bool(rows(kelvin, query, (runtime_id,))), "its life is in the ledger")
    ((standby_us, restore_us, total_us),) = rows(kelvin, query, (runtime_id,))
    return standby_us, restore_us, total_us


def test_a_sleeper_holds_no_slot_and_wakes_to_the_right_answer(sleepy: Installation, llama: Path) -> None:
    """A sleeping replica (level 1) holds no device slot. The same process wakes without a new lease, and its life
    balances."""
    kelvin = sleepy
    replica = _asleep(kelvin)
    since_s = time.monotonic()
    held = kelvin.admin.request("GET", "/admin/v1/status")["device"]["held"]
    seen = report(kelvin, "llama")
    assert (seen.state, seen.leases, seen.kv_blocks_total) == (RuntimeState.ASLEEP, 1, 0)
    told = json.loads(run(kelvin, "explain", "idle", "llama", "--json"))
    shown = next(version for version in told["versions"] if "prod" in version["aliases"])
    assert (told["setting"], shown["level"]) == ("sleep", "asleep")
    assert "it sleeps" in run(kelvin, "explain", "start", "llama")
    leases, slept_us = cache(kelvin)["leases_granted"], (time.monotonic() - since_s) * 1e6
    answer = complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=6, stream=True)
    assert answer.text.strip() == text_of(llama, greedy_continuation(llama, PROMPT, 6))
    after = sole_replica(kelvin, "llama")
    assert (after["runtime_id"], after["pid"]) == (replica["runtime_id"], replica["pid"])
    assert cache(kelvin)["leases_granted"] == leases
    assert kelvin.admin.request("GET", "/admin/v1/status")["device"]["held"] == held + 1
    timeline = kelvin.client.request("GET", f"/v1/requests/{answer.headers['x-request-id']}/timeline")
    stages = {stamp["stage"] for stamp in timeline["stamps"]}
    assert timeline["cold"]
    assert {"poked", "decided", "promoted", "ready", "prefilled"} <= stages
    assert "leased" not in stages
    kelvin.wait(lambda: _wakes(kelvin, "asleep") >= 1, "the wake was measured")
    words = run(kelvin, "explain", "idle", "llama")
    assert "the cheapest from" in words
    assert "wakes in" in words
    assert "it sleeps" not in run(kelvin, "explain", "start", "llama")
    kelvin.scale_to_zero("llama")
    standby_us, restore_us, total_us = _life(kelvin, replica["runtime_id"])
    assert 0 < restore_us < total_us
    assert slept_us <= standby_us < total_us, "time asleep is standby time"
    run(kelvin, "billing", "reconcile")


def test_dropped_weights_come_back_despite_a_killed_replica(sleepy: Installation, llama: Path) -> None:
    """A replica at level 2 has no lease, and leases its weights again when it wakes.
    Killed while it waits for that lease, its request is answered by another process."""
    kelvin, right = sleepy, text_of(llama, greedy_continuation(llama, PROMPT, 6))
    run(kelvin, "scale", "llama", "--idle", "sleep2")
    replica = _asleep(kelvin, "asleep2")
    seen = report(kelvin, "llama")
    assert (seen.state, seen.leases, seen.kv_blocks_total) == (RuntimeState.DEEP_SLEEP, 0, 0)
    assert "llama" in run(kelvin, "status")
    told = json.loads(run(kelvin, "explain", "idle", "llama", "--json"))
    shown = next(version for version in told["versions"] if "prod" in version["aliases"])
    assert (told["setting"], shown["level"], shown["next_level"]) == ("sleep2", "asleep2", None)
    assert "it sleeps" in run(kelvin, "explain", "start", "llama")
    kelvin.wait(lambda: _is_evicted(kelvin), "no process holds a slab")
    before = cache(kelvin)["leases_granted"]
    answer = complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=6, stream=True)
    assert answer.text.strip() == right
    after = sole_replica(kelvin, "llama")
    assert (after["runtime_id"], after["pid"]) == (replica["runtime_id"], replica["pid"])
    assert cache(kelvin)["leases_granted"] == before + 1
    timeline = kelvin.client.request("GET", f"/v1/requests/{answer.headers['x-request-id']}/timeline")
    stages = [stamp["stage"] for stamp in timeline["stamps"]]
    assert timeline["cold"]
    assert [stage for stage in stages if stage in ("promoted", "leased", "bound", "ready")] == [
        "promoted", "leased", "bound", "ready"
    ]  # fmt: skip
    kelvin.wait(lambda: _wakes(kelvin, "asleep2") >= 1, "the wake was measured")
    assert "time to fetch weights" in run(kelvin, "explain", "idle", "llama")

    kelvin.wait(lambda: kelvin.model("llama")["state"] == "asleep2", "it sleeps again")
    agent = services(kelvin)["weightcache"]
    agent.suspend()
    try:
        with ThreadPoolExecutor(1) as caller:
            late = caller.submit(complete, kelvin, "llama", prompt_of(PROMPT), max_tokens=6)
            kelvin.wait(lambda: report(kelvin, "llama").state is RuntimeState.RESTORING, "it waits for its lease")
            os.kill(replica["pid"], signal.SIGKILL)
            kelvin.wait(lambda: all(each["pid"] != replica["pid"] for each in replicas(kelvin, "llama")), "it is dead")
            agent.resume()
            answer = late.result(60)
    finally:
        agent.resume()
    assert (answer.status, answer.text.strip()) == (200, right)
    kelvin.scale_to_zero("llama")
    standby_us, restore_us, total_us = _life(kelvin, replica["runtime_id"])
    assert 0 < standby_us < total_us, "time asleep is standby time"
    assert restore_us > 0
    run(kelvin, "billing", "reconcile")


def _is_evicted(kelvin: Installation) -> bool:
    try:
        kelvin.admin.request("POST", "/admin/v1/cache/evict", {"tier": "host"})
    except InstallationFailed:  # a process that is about to end
        return False
    return True


def _idle(kelvin: Installation) -> Any:
    found = kelvin.admin.request("GET", "/admin/v1/models/llama/idle")
    return next(version for version in found["versions"] if "prod" in version["aliases"])


def _wakes(kelvin: Installation, name: str) -> int:
    """Return how many wakes from this level were measured."""
    (level,) = [each for each in _idle(kelvin)["levels"] if each["level"] == name]
    return int(level["seen"])


def _state(kelvin: Installation) -> str:
    try:
        return str(kelvin.model("llama")["state"])
    except InstallationFailed:  # the control plane is away
        return "unknown"


def test_a_control_plane_that_comes_back_finds_its_sleeper(sleepy: Installation) -> None:
    """The next control plane adopts the sleeping replica, and the same process wakes."""
    kelvin = sleepy
    replica = _asleep(kelvin)
    control = services(kelvin)["controlplane"]
    control.kill()
    control.wait(60)
    kelvin.wait(lambda: _state(kelvin) == "asleep", "it is adopted")
    assert complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
    after = sole_replica(kelvin, "llama")
    assert after["pid"] == replica["pid"]


def test_free_waiting_frees_the_device_early(sleepy: Installation) -> None:
    """If waiting costs nothing, the device is freed long before the window ends.
    Negative control: if waiting is very expensive, the replica stays warm."""
    kelvin = sleepy
    run(kelvin, "scale", "llama", "--window", "60", "--grace", "30", "--idle", "auto", "--wait-price", "1000000000")
    assert complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
    kelvin.wait(lambda: (_idle(kelvin)["idle_s"] or 0) > 6, "no request arrives")
    assert _idle(kelvin)["level"] == "warm"
    run(kelvin, "scale", "llama", "--wait-price", "0")
    kelvin.wait(lambda: _idle(kelvin)["level"] != "warm", "the device is free", 30)
    assert _idle(kelvin)["idle_s"] < 60
    for replica in replicas(kelvin, "llama"):  # a killed sleeping replica is replaced by a new start
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(replica["pid"], signal.SIGKILL)
    kelvin.wait(lambda: not replicas(kelvin, "llama"), "nothing is left of it")
    assert complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
