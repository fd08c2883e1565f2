"""The control plane without a dependency: tests that belong to no single client's file. Replicas are fake processes."""

from pathlib import Path

import pytest

from controlplane.scaling.local import replica_sleeper, runtime_process
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from tests.controlplane.builders import key
from tests.controlplane.control_plane_server import push, report_request, running_control_plane, wait_for_state
from tests.controlplane.machine_fixture import LocalMachine, RunDirectory, local
from tests.eventually import eventually
from tests.process_state import stop


async def start_stopped_replica(it: LocalMachine, model: str) -> None:
    """Start a replica of the model, then stop its process with SIGSTOP."""
    it.apply(key(model), 1)
    await it.wait_until_ready(key(model))
    (replica,) = it.table.replicas_of(key(model))
    stop(replica.pid)


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten timeouts. The stopped process never answers, so they cut off nothing."""
    monkeypatch.setattr(runtime_process, "DRAIN_CALL_S", 0.1)
    monkeypatch.setattr(replica_sleeper, "SLEEP_S", 0.1)


async def check_replaced(it: LocalMachine, model: str) -> None:
    """Wait until the replica has ended, then check that the next start succeeds."""
    await eventually(lambda: not it.table.replicas_of(key(model)), "it is ended")
    it.apply(key(model), 1)
    await it.wait_until_ready(key(model))
    assert len(it.run.calls(f"bind:{model}")) == 2
    assert it.listener.failures == []


async def test_unresponsive_replica_ends_after_its_drain_time(run: RunDirectory) -> None:
    """The replica cannot receive the drain call. The drain timeout is short, so the watchdog does not end it first."""
    async with local(run, drain_s=0.5, term_s=0.1) as it:
        await start_stopped_replica(it, "m")
        it.apply(key(), 0)
        await check_replaced(it, "m")
        assert run.calls("drain") == []


async def test_drain_without_reports_ends_after_its_time(run: RunDirectory) -> None:
    """The replica is draining with a request in flight, then reports nothing more."""
    async with local(run, drain_s=0.5, term_s=0.1) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.apply(key("busy"), 0)
        await eventually(lambda: len(run.calls("drain")) == 1)
        (replica,) = it.table.replicas_of(key("busy"))
        assert replica.state is ReplicaState.DRAINING
        stop(replica.pid)
        await check_replaced(it, "busy")


async def test_replica_that_cannot_sleep_is_ended(run: RunDirectory) -> None:
    """It is unknown what memory it holds."""
    async with local(run, term_s=0.1) as it:
        await start_stopped_replica(it, "m")
        it.actuator.sleep(key(), Level.ASLEEP)
        await check_replaced(it, "m")


async def test_without_a_cache_agent_models_start(data: Path) -> None:
    """Cache operations and the cache state are unavailable. A model at zero replicas still starts."""
    async with running_control_plane(data) as client:
        for method, path in (("POST", "/cache/evict"), ("POST", "/cache/check"), ("GET", "/cache")):
            status, problem = await client.admin(method, path, {"tier": "host"} if path.endswith("evict") else None)
            assert (status, problem["code"]) == (503, "unavailable"), path
        await push(client)
        await report_request(client)
        await wait_for_state(client, "ready")
