"""The control plane as a process, a cluster, and a parked pod behind mutual TLS: from a load report to a replica,
across a kill of the control plane, to the release.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest
from fastapi import FastAPI, Request, Response

from coldstart_bench.harness.installation import free_port
from controlplane.knative.policy.pool_service import DELETION_COST, LISTEN_PORT
from kelvin.contracts.artifacts.runtime_control import BindPodRequest, BindResponse, RuntimeReport, RuntimeState
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import ReplicaRow
from kelvin.contracts.wire import decode, encode
from kelvin.crypto.tls_identity import IdentityFiles, TlsIdentity
from kelvin.ipc.internal_server import serve_with_roles
from kelvin.ipc.tcp_listener import listen
from runtime.app.roles_policy import BIND_API_RULES
from tests.cluster.fake_knative import (
    IMAGE,
    SERVING,
    SETTINGS,
    SLICES,
    FakeKnative,
    inside,
    make_tenant_namespace,
    register,
    until,
)
from tests.controlplane.builders import key, stats
from tests.controlplane.control_plane_server import control_plane_process, open_feed
from tests.eventually import eventually
from tests.kelvin.crypto.pki import Authority, write

POOLS: Final = "kelvin--pools"
SERVICE: Final = "kelvin-pool--small"
# An address of this process only, since all pods use the same port.
ADDRESS: Final = f"127.75.{os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"


@dataclass
class ParkedPod:
    """A parked pod."""

    take: BindPodRequest | None = None
    life: int = 1
    binds: int = 0
    releases: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/control/bind")
        async def bind(request: Request) -> Response:
            self.take, self.binds = decode(await request.body(), BindPodRequest), self.binds + 1
            return Response(encode(BindResponse(runtime_id=f"r{self.life}", max_streams=4, spans=(), bytes_by_tier={})))

        @app.post("/control/release")
        async def release(_: Request) -> Response:
            if self.take is None:  # it was released already, and the call is repeated
                return Response(status_code=204)
            self.take, self.life, self.releases = None, self.life + 1, self.releases + 1
            return Response(status_code=202)

        @app.get("/control/state")
        async def state(_: Request) -> Response:
            report = RuntimeReport(runtime_id=f"r{self.life}", pid=1, state=RuntimeState.STANDBY)
            if (of := self.take) is not None:
                report = msgspec.structs.replace(
                    report, state=RuntimeState.READY, tenant=of.tenant, model=of.model, version=of.version
                )
            return Response(encode(report))

        return app


@asynccontextmanager
async def listening(pod: ParkedPod, inner: Path) -> AsyncIterator[None]:
    """Serve the pod's control API. Only the control plane may call it."""
    stop = asyncio.Event()
    identity = TlsIdentity(_files(inner, Role.RUNTIME), Role.RUNTIME)
    serving = asyncio.create_task(
        serve_with_roles(pod.app(), listen(ADDRESS, LISTEN_PORT), identity.server_context(), BIND_API_RULES, stop, 1)
    )
    try:
        yield
    finally:
        stop.set()
        await serving


_AUTHORITY: Final = Authority()


def _files(inner: Path, role: Role) -> IdentityFiles:
    return write(inner / role, _AUTHORITY.of(role), _AUTHORITY)


def appears(knative: FakeKnative, address: str = ADDRESS, port: int = 8012) -> None:
    """Create the pod's object, its entry in the EndpointSlice, and the Revision."""
    server = knative.server
    found = server.get(SERVING, "Service", SERVICE, POOLS)
    condition = {"type": "Ready", "status": "True"}
    name = f"{SERVICE}-00001"
    server.set_status(found, {"conditions": [condition], "latestCreatedRevisionName": name})
    container = {"name": "runtime", "image": IMAGE}
    about = {"name": "one", "namespace": POOLS}
    server.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {"containers": [container]}})
    labels = {
        "networking.internal.knative.dev/serviceType": "Private",
        "serving.knative.dev/service": SERVICE,
    }
    server.create({
        "apiVersion": SLICES, "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": f"{name}-private-x", "namespace": POOLS, "labels": labels},
        "endpoints": [
            {
                "addresses": [address], "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": "one", "namespace": POOLS},
            }
        ],
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    })  # fmt: skip


def cost(knative: FakeKnative) -> str | None:
    """Return the deletion cost of the pod."""
    found: str | None = (knative.server.get("v1", "Pod", "one", POOLS)["metadata"].get("annotations") or {}).get(
        DELETION_COST
    )
    return found


@pytest.mark.uvloop
async def test_from_a_report_to_a_release(knative: FakeKnative, tmp_path: Path) -> None:
    """A pooled model has no Service, but the pool has one. A load report binds its version to the parked pod. The
    binding survives a killed control plane and is in the next one's first snapshot. A deletion releases it. The pool
    wants one pod more than are bound.
    """
    make_tenant_namespace(knative.server, "-pools")
    inner, pod = tmp_path / "inner", ParkedPod()
    _files(inner, Role.CONTROLPLANE)
    settings = SETTINGS | {
        "inner_tls": str(inner), "control_listen": f"127.0.0.1:{free_port()}", "cluster_pools": "small=1000000:1:4",
        "cluster_pooled": "default/m",
    }  # fmt: skip

    def rows(line_rows: tuple[ReplicaRow, ...]) -> list[tuple[str, str, bool]]:
        return [(row.runtime_id, row.url, row.draining) for row in line_rows]

    expected = ("r1", f"http://{ADDRESS}:8012", False)
    with control_plane_process(tmp_path / "data", **settings) as process:
        async with inside(tmp_path) as client, open_feed(client) as reader, listening(pod, inner):
            await register(client)
            await eventually(lambda: knative.services() == {SERVICE}, "the pool's Service alone")
            appears(knative)
            line = await until(reader, lambda line: bool(line.pools))
            assert [(row.namespace, row.name, row.share) for row in line.pools] == [(POOLS, f"{SERVICE}-00001", 1.0)]
            await eventually(lambda: cost(knative) == "0", "it is parked")
            assert (await client.request("POST", "/internal/v1/stats", encode(stats(key()))))[0] == 204
            line = await until(reader, lambda line: bool(line.replicas))
            assert rows(line.replicas) == [expected]
            line = await until(reader, lambda line: bool(line.pools))
            assert [(row.share, row.wanted) for row in line.pools] == [(2.0, 2)]
            await eventually(lambda: cost(knative) == "1000", "it costs more than a parked pod")
            _, shown = await client.admin("GET", "/status")
            assert shown["pools"] == [{"name": "small", "wanted": 2, "pods": {"bound": 1}}]
            assert pod.take is not None
            assert (pod.take.device_class, pod.take.store) == ("h100", "s3://models/prod")
        process.kill()
        process.wait(60)
    assert pod.binds == 1
    knative.forget_the_lease()
    (tmp_path / "data" / "run" / "control.sock").unlink(missing_ok=True)
    with control_plane_process(tmp_path / "data", **settings) as process:
        async with listening(pod, inner), inside(tmp_path) as client, open_feed(client) as reader:
            assert rows((await reader.line()).replicas) == [expected]
            assert (await client.admin("DELETE", "/models/m?force=true"))[0] == 200
            await until(reader, lambda line: line.removed_replicas == ("r1",))
            assert (pod.releases, pod.life) == (1, 2)
            await eventually(lambda: cost(knative) == "0", "it is parked again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
