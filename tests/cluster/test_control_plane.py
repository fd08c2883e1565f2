"""The control plane as a real process on a fake cluster: what it writes there, and what it publishes.

The test plays Knative and the kubelet.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from coldstart_bench.harness.installation import free_port
from controlplane.app.role_label import LEADER
from controlplane.knative.policy.knative_service import (
    ZERO_INITIAL_SCALE,
    ClusterSpec,
    ControlEndpoints,
    PodVersion,
    render_service,
    service_name,
)
from controlplane.knative.policy.object_labels import ROLE
from kelvin.contracts.artifacts.runtime_control import GateJob, SealJob
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.wire import encode
from tests.cluster.fake_knative import (
    FEATURES,
    IMAGE,
    NAMESPACE,
    SETTINGS,
    FakeKnative,
    inside,
    register,
    running,
    until,
)
from tests.cluster.kube_api.status_answers import Json
from tests.controlplane.builders import digest, registration
from tests.controlplane.control_plane_server import ControlPlaneClient, control_plane_process, open_feed
from tests.controlplane.health_probe import probing
from tests.controlplane.knative.fake_cluster import differing_paths
from tests.controlplane.machine_fixture import RunDirectory, fake_zygote
from tests.eventually import eventually

CLUSTER: Final = ClusterSpec(
    image=IMAGE, store_url="s3://models/prod", cores=2, secret="store", timeout_s=300,
    features=frozenset(FEATURES), node_selector={"gpu": "h100"},
    tolerations=({"key": "spot", "operator": "Exists"},), priority_class="models", device="nvidia.com/gpu",
    device_class="h100", cache="/var/lib/kelvin-cache",
    control=ControlEndpoints(url="https://control:7500", snapshotter_url="https://snapshotter:7501", secret="inner"),
)  # fmt: skip


async def test_from_a_registration_to_its_deletion(knative: FakeKnative, tmp_path: Path) -> None:
    """Registration writes the rendered Service. Its revision and pods reach the feed, a scale reaches the Service, and
    deletion removes everything. Calls that only one machine supports are refused.
    """
    with running(tmp_path) as process:
        async with inside(tmp_path) as client, open_feed(client) as reader:
            assert (await reader.line()).machine is None
            await register(client)
            name = service_name("m", digest("a"))
            await eventually(lambda: knative.services() == {name}, "its Service")
            of = registration()
            wanted = render_service(
                PodVersion(
                    tenant="default", model="m", version=of.version, weight_bytes=of.total_bytes, kv_bytes=512 << 20,
                    max_streams=64,
                ),
                CLUSTER,
            )  # fmt: skip
            assert differing_paths(wanted, knative.service()) == []
            revision = knative.becomes_ready()
            line = await until(reader, lambda line: bool(line.revisions))
            assert [(row.namespace, row.name) for row in line.revisions] == [(NAMESPACE, revision)]
            for is_ready in (False, True):
                knative.pods("one", is_ready=is_ready)
                (row,) = (await until(reader, lambda line: bool(line.replicas))).replicas
                assert (row.runtime_id, row.url, row.unproven) == ("one", "http://10.0.0.1:8012", not is_ready)
            _, shown = await client.admin("GET", "/models/m")
            assert (shown["state"], shown["versions"][0]["replicas"][0]["runtime_id"]) == ("ready", "one")
            assert (await client.admin("PUT", "/models/m/scale", {"min": 1, "max": 3}))[0] == 200
            template = ("spec", "template", "metadata", "annotations", "autoscaling.knative.dev/max-scale")
            await eventually(lambda: _at(knative.service(), template) == "3", "the scale")
            status, problem = await client.admin("PUT", "/models/m/scale", {"idle": "sleep"})
            assert (status, problem["detail"]) == (400, "idle=sleep: must be zero on a cluster; `min` keeps replicas")
            status, problem = await client.admin("POST", "/models/m/stop")
            assert (status, problem["code"]) == (501, "one_machine_only")
            status, processes = await client.admin("GET", "/status")
            assert (status, [each["ready"] for each in processes["processes"]]) == (200, [True])
            _, page = await client.admin("GET", "/metrics")
            assert 'kelvin_cluster_refused_objects{process="controlplane",reason="Invalid"} 0' in page
            slice_ = knative.pods()
            assert (await until(reader, lambda line: bool(line.removed_replicas))).removed_replicas == ("one",)
            assert (await client.admin("DELETE", "/models/m?force=true"))[0] == 200
            assert (await until(reader, lambda line: bool(line.removed_revisions))).removed_revisions
            knative.server.delete(slice_)
            await eventually(lambda: not knative.services(), "the deletion")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def _at(obj: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        obj = obj[step]
    return obj


async def test_killed_control_plane_continues_its_work(knative: FakeKnative, tmp_path: Path) -> None:
    """The next process repairs an edit and a deletion, and finishes the deploy. Its first snapshot has the running pod,
    and the old version goes once the new one is ready.
    """
    old, new = service_name("m", digest("a")), service_name("m", digest("b"))
    with running(tmp_path) as process:
        async with inside(tmp_path) as client:
            await register(client)
            await eventually(lambda: knative.services() == {old}, "its Service")
            knative.becomes_ready()
            knative.pods("one")
            await register(client, "b")
            assert (await client.admin("POST", "/models/m/deploy", {"version": digest("b")}))[0] == 200
        process.kill()
        process.wait(60)
    edited = knative.service()
    edited["spec"]["template"]["spec"]["containers"][0]["image"] = "somebody/elses:1"
    knative.server.change(edited, {"spec": edited["spec"]})
    if new in knative.services():
        knative.server.delete(knative.service("b"))
    knative.forget_the_lease()
    with running(tmp_path):
        async with inside(tmp_path) as client, open_feed(client) as reader:
            snapshot = await reader.line()
            assert [row.runtime_id for row in snapshot.replicas] == ["one"]
            await eventually(lambda: knative.services() == {old, new}, "both")
            await eventually(lambda: _image(knative.service()) == IMAGE, "the repair")
            knative.becomes_ready("b")
            await eventually(lambda: knative.services() == {new}, "only the new one")


async def test_new_image_reaches_one_version_after_another(knative: FakeKnative, tmp_path: Path) -> None:
    """The second version keeps its image until the first one's new Revision is ready. A scale is written meanwhile. At
    zero the second one gets the image without a pod.
    """
    image = "registry.example/kelvin@sha256:" + "1" * 64
    initial, most = (f"autoscaling.knative.dev/{name}-scale" for name in ("initial", "max"))
    knative.server.features[ZERO_INITIAL_SCALE] = "true"

    def notes(letter: str) -> Json:
        found: Json = knative.service(letter)["spec"]["template"]["metadata"]["annotations"]
        return found

    with running(tmp_path) as process:
        async with inside(tmp_path) as client:
            for letter in ("a", "b"):
                await register(client, letter)
            weights = {digest("a")[:12]: 9, digest("b")[:12]: 1}
            assert (await client.admin("PUT", "/models/m/split", {"weights": weights}))[0] == 200
            await eventually(lambda: len(knative.services()) == 2, "their Services")
            for letter in ("a", "b"):
                knative.becomes_ready(letter)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    features = ",".join((*FEATURES, ZERO_INITIAL_SCALE))
    with running(tmp_path, cluster_image=image, cluster_features=features):
        async with inside(tmp_path) as client:
            await eventually(lambda: _image(knative.service("a")) == image, "the first one's new image")
            before = knative.service("b")
            assert (await client.admin("PUT", "/models/m/scale", {"max": 3}))[0] == 200
            await eventually(lambda: notes("a")[most] == notes("b")[most] == "3", "the scale")
            after = knative.service("b")
            assert _image(after) == IMAGE
            assert after["spec"]["template"]["spec"] == before["spec"]["template"]["spec"]
            assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
            _, shown = await client.admin("GET", "/models/m")
            reasons = {each["version"][0]: each["image_behind"]["reason"] for each in shown["versions"]}
            assert reasons == {"a": "starting", "b": "waiting"}
            knative.becomes_ready("b")
            assert _image(knative.service("b")) == IMAGE
            knative.becomes_ready("a")
            await eventually(lambda: _image(knative.service("b")) == image, "the second one's new image")
            assert (notes("b")[initial], notes("b")[most], initial in notes("a")) == ("0", "3", False)
            _, page = await client.admin("GET", "/metrics")
            assert 'kelvin_cluster_versions_behind{process="controlplane",reason="failed"} 0' in page


async def test_the_lead_is_lost_and_won_again(knative: FakeKnative, tmp_path: Path) -> None:
    """Open connections close at once. The same process leads again and starts from the present state."""
    old, new = service_name("m", digest("a")), service_name("m", digest("b"))
    with running(tmp_path) as process:
        async with inside(tmp_path) as client, open_feed(client) as reader:
            await register(client)
            await eventually(lambda: knative.services() == {old}, "its Service")
            revision = knative.becomes_ready()
            knative.pods("one")
            await until(reader, lambda line: bool(line.replicas))
            knative.take_the_lease()
            with pytest.raises((aiohttp.ClientError, msgspec.DecodeError)):
                await until(reader, lambda line: False)
        async with inside(tmp_path) as client:
            snapshot = await first_feed_line(client)
            assert [row.name for row in snapshot.revisions] == [revision]
            assert [row.runtime_id for row in snapshot.replicas] == ["one"]
            await register(client, "b")
            assert (await client.admin("POST", "/models/m/deploy", {"version": digest("b")}))[0] == 200
            await eventually(lambda: knative.services() == {old, new}, "both")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def first_feed_line(client: ControlPlaneClient) -> Feed:
    """Return the first line of a feed, once there is one."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with open_feed(client) as reader:
                    return await reader.line()
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)


def _image(obj: Json) -> str:
    image: str = obj["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


async def test_second_control_plane_waits_for_the_lease(knative: FakeKnative, tmp_path: Path) -> None:
    """It is alive but not ready, without socket and database. It starts when the first one ends."""
    port, other = free_port(), tmp_path / "other"
    with running(tmp_path) as first:
        await _open(tmp_path)
        with control_plane_process(other, **SETTINGS, health_listen=f"127.0.0.1:{port}") as second:
            async with probing(port) as says:
                async with asyncio.timeout(60):
                    while (await says("/healthz"))[0] != 200:
                        await asyncio.sleep(0.01)
                assert await says("/readyz") == (503, "waits for the lead")
                assert not (other / "kelvin.db").exists()
                assert not (other / "run" / "control.sock").exists()
                first.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    while (await says("/readyz"))[0] != 200:
                        assert (await says("/healthz"))[0] == 200
                assert (other / "kelvin.db").exists()
            assert first.wait(60) == 0
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0


async def test_service_leads_to_the_leader_alone(knative: FakeKnative, tmp_path: Path) -> None:
    """Both pods are ready before and after the leader is killed and restarted. The Service has one endpoint, the
    leader's, and the killed pod loses the label.
    """
    ports = {"one": free_port(), "two": free_port()}
    for pod in ports:
        about = {"name": pod, "namespace": "platform", "labels": {"app.kubernetes.io/name": "controlplane"}}
        spec = {"containers": [{"name": "controlplane", "image": IMAGE}]}
        knative.server.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})

    def start(pod: str) -> Any:
        settings = SETTINGS | {"cluster_pod": pod, "health_listen": f"127.0.0.1:{ports[pod]}"}
        (tmp_path / pod / "data" / "run" / "control.sock").unlink(missing_ok=True)
        return control_plane_process(tmp_path / pod / "data", **settings)

    async def ready(*names: str, and_leads: str) -> None:
        """Wait until these pods are ready and the Service's only endpoint is `and_leads`."""
        readiness: dict[str, tuple[int, str]] = {}
        endpoints: list[str] = []
        try:
            async with asyncio.timeout(60):
                while True:
                    for pod in names:
                        async with probing(ports[pod]) as says:
                            readiness[pod] = await says("/readyz")
                    pods = [each["metadata"] for each in knative.server.objects("v1", "Pod", "platform")]
                    endpoints = [each["name"] for each in pods if each["labels"].get(ROLE) == LEADER]
                    assert len(endpoints) <= 1
                    if {status for status, _ in readiness.values()} == {200} and endpoints == [and_leads]:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError((readiness, endpoints)) from None

    for pod in ports:
        (tmp_path / pod).mkdir()
    with start("one") as one:
        await _open(tmp_path / "one")
        with start("two") as two:
            await ready("one", "two", and_leads="one")
            one.kill()
            one.wait(60)
            knative.forget_the_lease()
            await _open(tmp_path / "two")
            with start("one"):
                await ready("one", "two", and_leads="two")
                two.send_signal(signal.SIGTERM)  # as a drain of its node does
                assert two.wait(60) == 0
                await ready("one", and_leads="one")
                with start("two"):
                    await ready("one", "two", and_leads="one")


async def test_a_leader_without_a_database(knative: FakeKnative, tmp_path: Path) -> None:
    """It is alive and not ready while it waits. Without a liveness answer the kubelet would restart it again and
    again.
    """
    port, unused_port = free_port(), free_port()
    log = tmp_path / "controlplane.log"
    database = f"postgresql://kelvin@127.0.0.1:{unused_port}/kelvin"
    with running(tmp_path, database=database, health_listen=f"127.0.0.1:{port}") as process:
        async with probing(port) as says, asyncio.timeout(60):
            while (await says("/healthz"))[0] == 0:
                await asyncio.sleep(0.01)  # the process is still starting
            while "the database can't be opened" not in log.read_text():
                assert ((await says("/healthz"))[0], (await says("/readyz"))[0]) == (200, 503)
            assert knative.leader(), "it holds the Lease"
            for _ in range(20):
                assert (await says("/healthz"))[0] == 200
                status, why = await says("/readyz")
                assert status == 503
                assert why.startswith("waits for the database: it can't be reached")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def _open(tmp_path: Path) -> None:
    async with inside(tmp_path):
        pass


async def test_a_push_needs_a_zygote_beside(knative: FakeKnative, tmp_path: Path) -> None:
    """A zygote may start later. Its jobs are done, and no standby stays."""
    where = RunDirectory(tmp_path / "data" / "run")
    gate, seal = encode(GateJob(config_json="{}", tensors={})), encode(SealJob(tenant="default", version=digest("a")))
    with running(tmp_path):
        await _open(tmp_path)
        with fake_zygote(where):
            async with inside(tmp_path) as client:
                status, facts = await client.request("POST", "/internal/v1/jobs/gate", gate)
                assert (status, facts["architecture"]) == (200, "LlamaForCausalLM")
                status, attestation = await client.request("POST", "/internal/v1/jobs/seal", seal)
                assert (status, attestation["version"]) == (200, digest("a"))
                await eventually(lambda: not where.sockets(), "the end of the standbys")
                assert knative.services() == set()


def test_missing_cluster_ends_the_control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with running(tmp_path) as process:
        assert process.wait(60) == 2
    assert "KELVIN_SCALING=knative: no cluster to speak to" in (tmp_path / "controlplane.log").read_text()
