"""A whole activator on Knative's data path: plain HTTP requests by Revision, and probes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from coldstart_bench.harness.installation import free_port
from kelvin.contracts.serving.control_messages import RevisionRow
from tests.activator.control import KEY, OTHER, STRANGER
from tests.activator.replica import DONE
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.activator.scale_link.test_knative_cluster import NAME, REVISION, row_of
from tests.activator.upstream.pod import FakePod
from tests.activator.world import CHAT, STREAM, ActivatorWorld, ReceivedResponse, world

TO = {"Knative-Serving-Namespace": REVISION.namespace, "Knative-Serving-Revision": REVISION.name}
BEARER = {"Authorization": f"Bearer {KEY}"}


class Path8012:
    """A client of Knative's data path, as a gateway uses it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ask(self, path: str = "/v1/chat/completions", body: object = None, **headers: str) -> ReceivedResponse:
        """POST if there is a body, otherwise GET."""
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(
            "GET" if data is None else "POST", self._url + path, data=data, headers=headers
        ) as got:
            return ReceivedResponse(got.status, {k.lower(): v for k, v in got.headers.items()}, await got.read())


@asynccontextmanager
async def knative_world(tmp_path: Path) -> AsyncIterator[tuple[ActivatorWorld, Path8012, FakePod, StrictAutoscaler]]:
    """Start an activator on the data path with a version whose pod is ready and whose Revision is known."""
    autoscaler, pod, port = StrictAutoscaler(NAME), FakePod(), free_port()
    await autoscaler.start()
    await pod.start()
    try:
        async with (
            world(tmp_path, autoscaler=autoscaler.url, activator_listen=f"127.0.0.1:{port}") as here,
            aiohttp.ClientSession() as session,
        ):
            pod.is_ready = True
            gone = RevisionRow(tenant="default", model="m", version=OTHER, namespace="models", name="gone")
            here.control.publish(row_of(pod), revisions=(REVISION, gone))
            await here.publish(removed_revisions=(("default", "m", OTHER),))
            yield here, Path8012(session, f"http://127.0.0.1:{port}"), pod, autoscaler
    finally:
        await autoscaler.stop()
        await pod.stop()
    assert autoscaler.wrong == []


async def test_request_is_served_by_its_revision(tmp_path: Path) -> None:
    """A key's owner is served whole or streamed, as at the public address. The body may name this model only."""

    async with knative_world(tmp_path) as (here, path, pod, _):
        assert (got := await path.ask(body=CHAT, **TO, **BEARER)).status == 200, got.body
        assert got.json["choices"]
        host = {"Host": f"{REVISION.name}.{REVISION.namespace}.svc.cluster.local"}
        assert (await path.ask(body=CHAT, **host, **BEARER)).status == 200
        streamed = await path.ask(body=STREAM, **TO, **BEARER)
        assert streamed.body.endswith(DONE)
        assert len(pod.replica.calls) == 3
        for record in await here.control.wait_for_records(3):
            assert record.version == REVISION.version
        other = await path.ask(body={**CHAT, "model": "x"}, **TO, **BEARER)
        assert (other.status, other.code) == (400, "invalid_request")
        assert (await path.ask(body=CHAT, **TO)).status == 401
        stranger = await path.ask(body=CHAT, **TO, Authorization=f"Bearer {STRANGER}")
        assert (stranger.status, stranger.code) == (404, "model_not_found")
        assert (await path.ask("/admin/v1/models", **TO, **BEARER)).status == 404
        assert len(pod.replica.calls) == 3


async def test_unknown_revision_is_404(tmp_path: Path) -> None:
    """A Revision that was never known, was removed or is not named gives 404, as in Knative."""

    async with knative_world(tmp_path) as (_, path, pod, __):
        for name in ("x", "gone"):
            got = await path.ask(body=CHAT, **{**TO, "Knative-Serving-Revision": name}, **BEARER)
            assert (got.status, got.code) == (404, "model_not_found")
            assert name in got.body.decode()
            assert got.json["error"]["request_id"] == got.headers["x-request-id"]  # type: ignore[index]
        assert (await path.ask(body=CHAT, **BEARER)).status == 404
        assert not pod.replica.calls


async def test_knative_probes_are_answered(tmp_path: Path) -> None:
    """Probes by name and by hash are answered. The kubelet's probe fails while the autoscaler is unreachable."""

    async with knative_world(tmp_path) as (_, path, __, autoscaler):
        named = await path.ask("/healthz", **{"K-Network-Probe": "activator"})
        assert (named.status, named.body) == (200, b"activator")
        assert named.headers["x-request-id"].startswith("req_")
        hashed = await path.ask("/healthz", **{"K-Network-Probe": "probe", "K-Network-Hash": "abc"})
        assert (hashed.status, hashed.headers["k-network-hash"]) == (200, "abc")
        assert (await path.ask("/", **{"User-Agent": "kube-probe/1.36"})).status == 200
        await autoscaler.leave()
        async with asyncio.timeout(30):
            while (await path.ask("/", **{"User-Agent": "kube-probe/1.36"})).status != 500:
                await asyncio.sleep(0.02)
        assert (await path.ask("/healthz", **{"K-Network-Probe": "activator"})).status == 200
