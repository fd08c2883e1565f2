"""KubernetesCluster over HTTP: writes, refusals, retries, and the time limit of each call."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import dependencies
from controlplane.app.leader_election import LeaderElection
from controlplane.knative.apply.cluster import ApiFailure, Busy, Invalid, Json, Missing, Ref, Unreachable, WriteConflict
from tests.cluster.kube_api.api_server import ApiServer, Fault
from tests.controlplane.app.candidates import stand
from tests.controlplane.knative.api_server_fixture import (
    NAMESPACE,
    api_failure,
    config_map,
    open_test_client,
    rendered_service,
)
from tests.controlplane.knative.api_server_fixture import server as server
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually


def request_count(server: ApiServer, method: str) -> int:
    return sum(each.method == method for each in server.requests)


async def test_apply_takes_fields_back(server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A repeated apply changes nothing. Fields that other managers took are taken back, and the log names the
    manager.
    """
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(rendered_service())
        again = await it.apply(rendered_service())
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        edited = [made["spec"]["template"]["spec"]["containers"][0] | {"image": "evil"}]
        server.change(made, {"spec": {"template": {"spec": {"containers": edited}}}}, manager="kubectl-edit")
        back = await it.apply(rendered_service())
        (container,) = back["spec"]["template"]["spec"]["containers"]
        assert container["image"] == rendered_service()["spec"]["template"]["spec"]["containers"][0]["image"]
        forced = [each.query["force"] for each in server.requests]
        assert forced == ["false", "false", "false", "true"]
        assert server.requests[0].query == {"fieldManager": "kelvin", "force": "false", "fieldValidation": "Strict"}
        (logged,) = (each.getMessage() for each in caplog.records if each.name == "kelvin.cluster")
        assert logged == (
            "Service kelvin-models/llama-3f2a91c0b7de was changed by others, and is put right: Apply failed with "
            '1 conflict: conflict with "kubectl-edit" using serving.knative.dev/v1: .spec.template.spec.containers'
        )


def bogus() -> Json:
    obj = rendered_service()
    obj["spec"]["template"]["spec"]["bogus"] = 1
    return obj


def unscalable() -> Json:
    obj = rendered_service()
    obj["spec"]["template"]["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"] = "9"
    return obj


def elsewhere() -> Json:
    obj = config_map("a")
    obj["metadata"]["namespace"] = "nowhere"
    return obj


@pytest.mark.parametrize(
    ("obj", "kind", "word"),
    [
        pytest.param(bogus(), Invalid, "bogus", id="an unknown field"),
        pytest.param(unscalable(), Invalid, "max-scale", id="a refusal by a webhook"),
        pytest.param(elsewhere(), Missing, "nowhere", id="a missing namespace"),
    ],
)
async def test_refusals_are_classified(
    server: ApiServer, tmp_path: Path, obj: Json, kind: type[ApiFailure], word: str
) -> None:
    """The failure has the cluster's message."""
    async with open_test_client(server, tmp_path) as it:
        found = await api_failure(it.apply(obj))
        assert isinstance(found, kind)
        assert word in found.message


async def test_statuses_are_applied_apart(server: ApiServer, tmp_path: Path) -> None:
    """Only the status of the object is written."""
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(rendered_service())
        obj = {**bogus(), "status": {"url": "http://x"}}
        found = await it.apply_status(obj)
        assert found["status"]["url"] == "http://x"
        assert found["spec"] == made["spec"]


@pytest.mark.parametrize(
    ("faults", "want", "calls"),
    [
        pytest.param([Fault(409)] * 2, None, 3, id="two conflicts"),
        pytest.param([Fault(409)] * 3, WriteConflict, 3, id="conflicts without end"),
        pytest.param([Fault(drop=True)], None, 2, id="a closed connection"),
        pytest.param([Fault(lost=True)], None, 2, id="a lost response"),
        pytest.param([Fault(drop=True)] * 2, Unreachable, 2, id="only closed connections"),
        pytest.param([Fault(429, retry_after_s=7)], Busy, 1, id="a busy server"),
        pytest.param([Fault(503)], Unreachable, 1, id="a starting server"),
        pytest.param([Fault(500)], Unreachable, 1, id="a broken server"),
    ],
)
async def test_conflicts_are_retried_within_the_call(
    server: ApiServer, tmp_path: Path, faults: list[Fault], want: type[ApiFailure] | None, calls: int
) -> None:
    """Longer retries are left to the caller."""
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(*faults)
        if want is None:
            await it.apply(config_map("a"))
        else:
            found = await api_failure(it.apply(config_map("a")))
            assert isinstance(found, want)
            if isinstance(found, Busy):
                assert found.retry_after_s == 7.0
        assert request_count(server, "PATCH") == calls


@pytest.mark.parametrize("call", ["apply", "delete", "read"])
async def test_every_call_ends_in_its_time(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The limit is the call's row in `dependencies`, whatever the server does."""
    for name in ("CLUSTER", "LEASE"):
        monkeypatch.setattr(dependencies, name, replace(getattr(dependencies, name), timeout_s=0.2))
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(Fault(delay_s=300))
        ref = Ref("v1", "ConfigMap", NAMESPACE, "a")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "apply": lambda: it.apply(config_map("a")),
            "delete": lambda: it.delete(ref),
            "read": lambda: it.read(ref),
        }
        assert await api_failure(calls[call]()) == Unreachable("no answer within 0.2 s")


async def test_tries_of_an_apply_share_its_time(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conflict comes just in time. One limit bounds all tries together."""
    monkeypatch.setattr(dependencies, "CLUSTER", replace(dependencies.CLUSTER, timeout_s=1.0))
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(*[Fault(409, delay_s=0.6)] * 3)
        assert await api_failure(it.apply(config_map("a"))) == Unreachable("no answer within 1 s")


async def test_cancelled_call_leaves_nothing_open(server: ApiServer, tmp_path: Path) -> None:
    """The next call works, and the client closes."""
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(Fault(delay_s=300))
        call = asyncio.create_task(it.apply(config_map("a")))
        await eventually(lambda: request_count(server, "PATCH") == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await it.apply(config_map("a"))


async def test_delete_is_idempotent_and_bound_to_the_uid(server: ApiServer, tmp_path: Path) -> None:
    """The deletion is in the foreground, of exactly that object."""
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(config_map("a"))
        ref, uid = Ref.of(made), made["metadata"]["uid"]
        assert isinstance(await api_failure(it.delete(ref, uid="00000000-0000-0000-0000-000000000001")), WriteConflict)
        await it.delete(ref, uid=uid)
        assert server.requests[-1].body["propagationPolicy"] == "Foreground"
        await eventually(lambda: not server.objects("v1", "ConfigMap", NAMESPACE))
        await it.delete(ref, uid=uid)
        await it.delete(ref)


async def test_events_are_counted(server: ApiServer, tmp_path: Path) -> None:
    """Equal events are one, written at most once a minute. A failed write is ignored."""
    clock = VirtualClock()

    async with open_test_client(server, tmp_path, clock) as it:
        about = await it.apply(rendered_service())

        async def recorded(message: str = "no image") -> list[Json]:
            await it.record(about, "Refused", message, warning=True)
            return server.objects("v1", "Event", NAMESPACE)

        await recorded()
        (event,) = await recorded()
        assert (event["count"], event["type"], event["reason"]) == (1, "Warning", "Refused")
        assert event["involvedObject"]["uid"] == about["metadata"]["uid"]
        await clock.advance(61)
        (event,) = await recorded()
        assert event["count"] == 3
        await clock.advance(601)
        assert len(await recorded()) == 2
        server.inject_faults(Fault(500))
        assert len(await recorded("other")) == 2


async def test_lease_is_acquired_renewed_and_released(server: ApiServer, tmp_path: Path) -> None:
    """After the release the next candidate gets the Lease at once."""
    ref = Ref("coordination.k8s.io/v1", "Lease", NAMESPACE, "leader")

    clock = VirtualClock()
    async with open_test_client(server, tmp_path) as it:
        for name in ("a", "b"):
            election = LeaderElection(it, NAMESPACE, "leader", name, clock)
            leads = asyncio.Event()

            async def lead(leads: asyncio.Event = leads) -> None:
                leads.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(stand(election, lead))
            async with asyncio.timeout(30):
                await leads.wait()
            first = await it.read(ref)
            assert first is not None
            assert first["spec"]["holderIdentity"] == name
            await clock.advance(2.5)
            await eventually(lambda: request_count(server, "PUT") >= 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left = await it.read(ref)
            assert left is not None
            assert left["spec"]["holderIdentity"] == ""


def test_a_plain_installation_needs_no_client_of_a_cluster() -> None:
    """The `kubernetes` library is imported only where a cluster is called."""
    modules = "controlplane.app.app, controlplane.knative.apply.applier, controlplane.app.leader_election"
    program = f"import sys; sys.modules['kubernetes'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True)
