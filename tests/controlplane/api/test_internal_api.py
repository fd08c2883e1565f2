"""The internal API for other processes: feed, load reports, registrations, jobs, usage records and readiness."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from controlplane.api.internal_api import FeedStream, InternalServices, routes
from controlplane.registry.feed_hub import FeedHub
from controlplane.scaling.interfaces import ReplicaBackend
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.artifacts.runtime_control import GateJob, SealJob
from kelvin.contracts.serving.control_messages import (
    Feed,
    RegistrationResult,
    RequestBatch,
    StartProblem,
    TimelineAnswer,
)
from kelvin.contracts.timeline import Stage, Stamp
from kelvin.contracts.wire import decode, encode
from tests.controlplane.builders import TENANT, digest, key, opened_registry, registration, stats
from tests.controlplane.control_plane_server import open_feed, running_control_plane
from tests.controlplane.machine_fixture import RunDirectory
from tests.controlplane.usage_records import lifetime_record, request_record
from tests.controlplane.virtual_time import VirtualClock
from tests.eventually import eventually


async def test_feed_has_a_push_and_a_cold_start(data: Path) -> None:
    """The feed sends a snapshot, then the model and its version, the ready replica, its drain and its end, in order."""
    async with running_control_plane(data) as client, open_feed(client) as reader:
        snapshot = await reader.line()
        assert snapshot.full
        assert len(snapshot.keys) == 2
        assert (await client.request("POST", "/internal/v1/versions", encode(registration())))[0] == 201
        pushed = await reader.line()
        assert pushed.models[0].aliases == {"prod": digest("a")}
        assert pushed.versions[0].limits.max_streams == 64
        assert (await client.request("POST", "/internal/v1/versions", encode(registration())))[0] == 200
        assert (await client.request("POST", "/internal/v1/stats", encode(stats(key()))))[0] == 204
        (replica,) = (await reader.line()).replicas
        assert (data / "run" / replica.address).exists()
        assert not replica.draining
        headers = {"x-kelvin-principal": '{"key_id":"k","tenant":"default","scopes":["admin"]}'}
        await client.request("POST", "/admin/v1/models/m/stop", None, headers)
        assert (await reader.line()).replicas[0].draining
        gone = await reader.line()
        assert gone.removed_replicas == (replica.runtime_id,)
        assert gone.revision == snapshot.revision + 4


async def test_thousand_load_reports_start_one_replica(data: Path) -> None:
    """Each report is answered with 204, and one runtime is bound."""
    async with running_control_plane(data) as client:
        await client.request("POST", "/internal/v1/versions", encode(registration()))
        answers = await asyncio.gather(
            *(client.request("POST", "/internal/v1/stats", encode(stats(key(), 200.0, 200))) for _ in range(1000))
        )
        assert {status for status, _ in answers} == {204}
        async with open_feed(client) as reader:
            while not (await reader.line()).replicas:
                pass
        assert len(RunDirectory(data / "run").calls("bind:m")) == 1


async def test_jobs_run_on_standbys(data: Path) -> None:
    async with running_control_plane(data) as client:
        status, facts = await client.request(
            "POST", "/internal/v1/jobs/gate", encode(GateJob(config_json="{}", tensors={}))
        )
        assert (status, facts["architecture"]) == (200, "LlamaForCausalLM")
        job = SealJob(tenant="default", version=digest("a"))
        status, attestation = await client.request("POST", "/internal/v1/jobs/seal", encode(job))
        assert (status, attestation["version"]) == (200, digest("a"))


async def test_bad_bodies_are_refused_and_start_nothing(data: Path) -> None:
    """Every route decodes strictly."""
    async with running_control_plane(data) as client:
        usage = ("usage/requests", "usage/lifetimes", "usage/lives")
        for path in ("stats", "versions", "jobs/gate", "jobs/seal", *usage):
            status, problem = await client.request("POST", f"/internal/v1/{path}", b'{"surprise":1}')
            assert (path, status, problem["code"]) == (path, 400, "invalid_request")
            status, problem = await client.request("PATCH", f"/internal/v1/{path}")
            assert (path, status, problem["code"]) == (path, 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        pytest.param("requests", request_record(1), id="request records"),
        pytest.param("lifetimes", lifetime_record(1), id="lifetime records"),
        pytest.param("lives", lifetime_record(1), id="running-replica records"),
    ],
)
async def test_reserved_sources_are_kept_aside(data: Path, kind: str, record: RequestRecord | LifetimeRecord) -> None:
    """Sources of records about unseen deaths are reserved. A record with such a source is set aside, and others are
    stored. A running-replica report with one is refused. Control: any other source is accepted.
    """
    path, ours = f"/internal/v1/usage/{kind}", msgspec.structs.replace(record, source="cut-rt-7")
    async with running_control_plane(data) as client:
        status, problem = await client.request("POST", path, encode({"records": (record, ours)}))
        if kind == "lives":
            assert (status, problem["code"], problem["param"]) == (400, "invalid_request", "source")
            assert problem["detail"] == "source=cut-rt-7: must not begin with 'cut-'"
        else:
            assert status == 204
            with closing(sqlite3.connect(data / "kelvin.db")) as database:
                (reason,) = database.execute("SELECT reason FROM ledger_conflicts").fetchone()
            assert reason == "its source must not begin with 'cut-'"
        assert (await client.request("POST", path, encode({"records": (record,)})))[0] == 204


async def test_a_timeline_comes_from_the_durable_record(data: Path) -> None:
    """Its tenant can read it, also after a restart. Other tenants cannot."""
    record = RequestRecord(
        request_id="req-1", origin=RecordOrigin.ACTIVATOR, source="activator-1", sequence=1, tenant="default",
        model="m", version=digest("a"), key_id="k", runtime_id="r", started_at_us=1, ended_at_us=2, queued_us=0,
        outcome="ok", status=200, stream=True, prompt_tokens=1, cached_tokens=0, completion_tokens=1, device_us=1,
        timeline=(Stamp(Stage.ROUTED, 10), Stamp(Stage.READY, 500)),
    )  # fmt: skip
    path = "/internal/v1/requests/req-1/timeline?tenant="
    async with running_control_plane(data) as client:
        assert (await client.request("POST", "/internal/v1/usage/requests", encode(RequestBatch(records=(record,)))))[
            0
        ] == 204
    async with running_control_plane(data) as client:
        status, found = await client.request("GET", path + "default")
        assert (status, found["cold"], found["stamps"][1]) == (200, True, {"stage": "ready", "at_us": 500})
        assert (await client.request("GET", path + "other"))[0] == 404
        assert (await client.request("GET", "/internal/v1/requests/req-1/timeline"))[0] == 400


async def test_not_ready_without_a_zygote(data: Path) -> None:
    """It is alive as soon as it serves, and ready only while new standbys can be forked."""
    async with running_control_plane(data) as client:
        assert (await client.request("GET", "/healthz"))[0] == 200
        assert (await client.request("GET", "/readyz"))[0] == 200
        (data / "run" / "zygote.sock").rename(data / "run" / "away")
        assert (await client.request("GET", "/readyz"))[0] == 503
        assert (await client.request("GET", "/healthz"))[0] == 200
        (data / "run" / "away").rename(data / "run" / "zygote.sock")


async def test_a_reader_that_does_not_read_is_dropped() -> None:
    """If the socket is full, the stream ends after `write_s` without a last chunk, and its subscription is removed."""
    hub, sent, stuck = FeedHub(max_lines=5), [], asyncio.Event()

    async def send(message: dict[str, object]) -> None:
        sent.append(message)
        if len(sent) == 3:
            await stuck.wait()

    async def receive() -> dict[str, object]:
        await stuck.wait()
        return {"type": "http.disconnect"}

    streaming = asyncio.create_task(FeedStream(hub, write_s=0.05)({}, receive, send))  # type: ignore[arg-type]
    await eventually(lambda: len(sent) == 2)
    for _ in range(20):
        hub.publish(Feed(removed_replicas=("r",)))
    await streaming
    assert all(message.get("more_body", True) for message in sent)
    assert hub._subscriptions == set()


async def test_a_reader_that_leaves_is_forgotten(data: Path) -> None:
    hub = FeedHub()
    left = asyncio.Event()

    async def send(message: dict[str, object]) -> None:
        """Accept and ignore every message."""

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    streaming = asyncio.create_task(FeedStream(hub)({}, receive, send))  # type: ignore[arg-type]
    await eventually(lambda: len(hub._subscriptions) == 1)
    left.set()
    await streaming
    assert hub._subscriptions == set()
    assert decode(hub.heartbeat(), Feed).full is False


@pytest.mark.parametrize("obstacle", [None, "the namespace kelvin-default lacks the secret kelvin-store"])
async def test_registration_says_what_keeps_the_version_from_starting(data: Path, obstacle: str | None) -> None:
    """On a cluster, a tenant's namespace may be incomplete. The version is registered anyway."""
    problem = None if obstacle is None else StartProblem("missing_secret", obstacle)

    async def find(tenant: str) -> StartProblem | None:
        assert tenant == TENANT
        return problem

    async def nothing_known(tenant: str, request_id: str) -> TimelineAnswer:
        raise AssertionError

    feed = FeedHub()
    async with opened_registry(data, feed) as registry:
        running = cast(ReplicaBackend, SimpleNamespace(jobs=None, find_start_obstacle=find))
        internals = InternalServices(feed, nothing_known, registry, running, VirtualClock())
        transport = httpx.ASGITransport(Starlette(routes=routes(internals)))
        async with httpx.AsyncClient(transport=transport, base_url="http://control") as client:
            for status in (201, 200):
                answer = await client.post("/internal/v1/versions", content=encode(registration()))
                assert answer.status_code == status
                assert decode(answer.content, RegistrationResult).start_problem == problem
