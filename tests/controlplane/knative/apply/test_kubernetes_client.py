"""Calls of a cluster, by HTTP: what is written, what is refused, what is tried again, and by when each has ended."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import dependencies
from controlplane.app.leader_election import LeaderElection
from controlplane.knative.apply.cluster import ApiFailure, Busy, Conflict, Invalid, Json, Missing, Ref, Unreachable
from tests.cluster.kube_api.api_server import ApiServer, Fault
from tests.controlplane.app.candidates import stand
from tests.controlplane.knative.cluster_ground import (
    NAMESPACE,
    api_failure,
    config_map,
    open_test_client,
    rendered_service,
)
from tests.controlplane.knative.cluster_ground import server as server
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually


def asked(server: ApiServer, method: str) -> int:
    return sum(each.method == method for each in server.seen)


async def test_apply_takes_fields_back(server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same again changes nothing. What others took is taken back, and the log says by whose word what it was."""
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(rendered_service())
        again = await it.apply(rendered_service())
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        edited = [made["spec"]["template"]["spec"]["containers"][0] | {"image": "evil"}]
        server.change(made, {"spec": {"template": {"spec": {"containers": edited}}}}, manager="kubectl-edit")
        back = await it.apply(rendered_service())
        (container,) = back["spec"]["template"]["spec"]["containers"]
        assert container["image"] == rendered_service()["spec"]["template"]["spec"]["containers"][0]["image"]
        forced = [each.query["force"] for each in server.seen]
        assert forced == ["false", "false", "false", "true"]
        assert server.seen[0].query == {"fieldManager": "kelvin", "force": "false", "fieldValidation": "Strict"}
        (said,) = (each.getMessage() for each in caplog.records if each.name == "kelvin.cluster")
        assert said == (
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
        pytest.param(bogus(), Invalid, "bogus", id="a field that is none"),
        pytest.param(unscalable(), Invalid, "max-scale", id="what a webhook refuses"),
        pytest.param(elsewhere(), Missing, "nowhere", id="a namespace that is not there"),
    ],
)
async def test_refusals_are_classified(
    server: ApiServer, tmp_path: Path, obj: Json, kind: type[ApiFailure], word: str
) -> None:
    """Said as one of few, with the cluster's own words."""
    async with open_test_client(server, tmp_path) as it:
        found = await api_failure(it.apply(obj))
        assert isinstance(found, kind)
        assert word in found.message


async def test_statuses_are_applied_apart(server: ApiServer, tmp_path: Path) -> None:
    """The rest of the object does not count."""
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(rendered_service())
        told = {**bogus(), "status": {"url": "http://x"}}
        found = await it.apply_status(told)
        assert found["status"]["url"] == "http://x"
        assert found["spec"] == made["spec"]


@pytest.mark.parametrize(
    ("faults", "want", "calls"),
    [
        pytest.param([Fault(409)] * 2, None, 3, id="written in between, twice"),
        pytest.param([Fault(409)] * 3, Conflict, 3, id="again and again"),
        pytest.param([Fault(drop=True)], None, 2, id="a connection that was closed"),
        pytest.param([Fault(lost=True)], None, 2, id="an answer that was lost"),
        pytest.param([Fault(drop=True)] * 2, Unreachable, 2, id="a server that closes them all"),
        pytest.param([Fault(429, retry_after_s=7)], Busy, 1, id="a server that asks for a while"),
        pytest.param([Fault(503)], Unreachable, 1, id="a server that starts"),
        pytest.param([Fault(500)], Unreachable, 1, id="a server that breaks"),
    ],
)
async def test_conflicts_are_retried_within_the_call(
    server: ApiServer, tmp_path: Path, faults: list[Fault], want: type[ApiFailure] | None, calls: int
) -> None:
    """Within the call; the rest is for who called, who has a longer patience."""
    async with open_test_client(server, tmp_path) as it:
        server.fail(*faults)
        if want is None:
            await it.apply(config_map("a"))
        else:
            found = await api_failure(it.apply(config_map("a")))
            assert isinstance(found, want)
            if isinstance(found, Busy):
                assert found.retry_after_s == 7.0
        assert asked(server, "PATCH") == calls


@pytest.mark.parametrize("call", ["apply", "delete", "read"])
async def test_every_call_ends_in_its_time(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """By its row of the table, whatever the server does."""
    for name in ("CLUSTER", "LEASE"):
        monkeypatch.setattr(dependencies, name, replace(getattr(dependencies, name), timeout_s=0.2))
    async with open_test_client(server, tmp_path) as it:
        server.fail(Fault(delay_s=300))
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
    """Each conflict comes just in time: the row of the table bounds all tries together."""
    monkeypatch.setattr(dependencies, "CLUSTER", replace(dependencies.CLUSTER, timeout_s=1.0))
    async with open_test_client(server, tmp_path) as it:
        server.fail(*[Fault(409, delay_s=0.6)] * 3)
        assert await api_failure(it.apply(config_map("a"))) == Unreachable("no answer within 1 s")


async def test_cancelled_call_leaves_nothing_open(server: ApiServer, tmp_path: Path) -> None:
    """The next one is answered, and the client closes."""
    async with open_test_client(server, tmp_path) as it:
        server.fail(Fault(delay_s=300))
        call = asyncio.create_task(it.apply(config_map("a")))
        await eventually(lambda: asked(server, "PATCH") == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await it.apply(config_map("a"))


async def test_delete_is_idempotent_and_bound_to_the_uid(server: ApiServer, tmp_path: Path) -> None:
    """In the foreground, of that very object, and as often as one likes."""
    async with open_test_client(server, tmp_path) as it:
        made = await it.apply(config_map("a"))
        ref, uid = Ref.of(made), made["metadata"]["uid"]
        assert isinstance(await api_failure(it.delete(ref, uid="00000000-0000-0000-0000-000000000001")), Conflict)
        await it.delete(ref, uid=uid)
        assert server.seen[-1].body["propagationPolicy"] == "Foreground"
        await eventually(lambda: not server.objects("v1", "ConfigMap", NAMESPACE))
        await it.delete(ref, uid=uid)
        await it.delete(ref)


async def test_events_are_counted(server: ApiServer, tmp_path: Path) -> None:
    """The same one is one, told again once a minute; that they can't be told is nobody's trouble."""
    clock = VirtualClock()

    async with open_test_client(server, tmp_path, clock) as it:
        about = await it.apply(rendered_service())

        async def told(message: str = "no image") -> list[Json]:
            await it.record(about, "Refused", message, warning=True)
            return server.objects("v1", "Event", NAMESPACE)

        await told()
        (event,) = await told()
        assert (event["count"], event["type"], event["reason"]) == (1, "Warning", "Refused")
        assert event["involvedObject"]["uid"] == about["metadata"]["uid"]
        await clock.advance(61)
        (event,) = await told()
        assert event["count"] == 3
        await clock.advance(601)
        assert len(await told()) == 2
        server.fail(Fault(500))
        assert len(await told("other")) == 2


async def test_lease_is_acquired_renewed_and_released(server: ApiServer, tmp_path: Path) -> None:
    """In the form that the cluster takes; the next one has it at once."""
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
            await eventually(lambda: asked(server, "PUT") >= 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left = await it.read(ref)
            assert left is not None
            assert left["spec"]["holderIdentity"] == ""


def test_a_plain_installation_needs_no_client_of_a_cluster() -> None:
    """Its library is imported where a cluster is spoken to, and nowhere else."""
    modules = "controlplane.app.app, controlplane.knative.apply.applier, controlplane.app.leader_election"
    program = f"import sys; sys.modules['kubernetes'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True)
