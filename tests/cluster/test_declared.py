"""Models and tenants declared as custom resources, with the control plane as a real process."""

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.cluster.fake_knative import NAMESPACE, FakeKnative, inside, register, running, until
from tests.cluster.kube_api.api_server import ApiServer
from tests.cluster.kube_api.status_answers import Json
from tests.controlplane.builders import digest
from tests.controlplane.control_plane_server import open_feed
from tests.eventually import eventually

OURS: Final = "kelvin.dev/v1alpha1"
CRDS: Final = Path(__file__).parents[2] / "manifests" / "crds"


@pytest.fixture
def declaring(knative: FakeKnative) -> ApiServer:
    """The cluster with our CRDs."""
    for name in ("models", "modelversions", "tenants"):
        knative.server.create(yaml.safe_load((CRDS / f"{name}.yaml").read_text()))
    return knative.server


def declare(server: ApiServer, kind: str, name: str, **spec: Any) -> Json:
    """Create an object, as `kubectl create` does."""
    about = {"name": name} if kind == "Tenant" else {"name": name, "namespace": NAMESPACE}
    return server.create({"apiVersion": OURS, "kind": kind, "metadata": about, "spec": spec})


def conditions(server: ApiServer, kind: str, name: str) -> dict[str, tuple[str, str]]:
    """Return the conditions of the object's status."""
    namespace = "" if kind == "Tenant" else NAMESPACE
    status = server.get(OURS, kind, name, namespace).get("status") or {}
    return {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions") or ()}


def events(server: ApiServer, namespace: str = NAMESPACE) -> set[tuple[str, str, str, int]]:
    """Return kind, type, reason and count of each event."""
    found = server.objects("v1", "Event", namespace)
    return {(each["involvedObject"]["kind"], each["type"], each["reason"], each["count"]) for each in found}


def scale_of(knative: FakeKnative, letter: str, what: str = "min-scale") -> str | None:
    """Return an autoscaling annotation of a version's Service, by default `min-scale`."""
    notes = knative.service(letter)["spec"]["template"]["metadata"]["annotations"]
    found: str | None = notes.get(f"autoscaling.knative.dev/{what}")
    return found


async def test_what_is_declared_is_served(declaring: ApiServer, knative: FakeKnative, tmp_path: Path) -> None:
    """A model declared before its push scales as its object says, and its status is shown. A later change by the admin
    API holds and is reported as drift.
    """
    with running(tmp_path):
        async with inside(tmp_path) as client:
            declare(declaring, "Model", "m", tenant="default", scale={"min": 1, "max": 3})
            await eventually(
                lambda: conditions(declaring, "Model", "m").get("Ready") == ("False", "NotPushed"), "the status"
            )
            await register(client)
            await eventually(lambda: conditions(declaring, "Model", "m").get("Applied") == ("True", "Applied"), "done")
            await eventually(lambda: bool(knative.services()) and scale_of(knative, "a") == "1", "its Service")
            await eventually(lambda: bool(declaring.objects(OURS, "ModelVersion", NAMESPACE)), "its version")
            (version,) = declaring.objects(OURS, "ModelVersion", NAMESPACE)
            assert version["spec"] == {"tenant": "default", "model": "m", "version": digest("a")}
            assert conditions(declaring, "Model", "m")["InSync"] == ("True", "InSync")
            answer = await client.admin("PUT", "/models/m/scale", {"min": 0})
            assert answer[0] == 200
            await eventually(
                lambda: conditions(declaring, "Model", "m").get("InSync") == ("False", "ChangedElsewhere"), "it differs"
            )
            await eventually(lambda: scale_of(knative, "a") in (None, "0"), "the scale of the admin API")


async def test_windows_that_weigh_the_last_seconds(declaring: ApiServer, knative: FakeKnative, tmp_path: Path) -> None:
    """A weighted average becomes Knative's algorithm annotation. A linear one has no annotation."""
    word = "metric-aggregation-algorithm"

    with running(tmp_path):
        async with inside(tmp_path) as client:
            with pytest.raises(Exception, match="average"):
                declare(declaring, "Model", "m", tenant="default", scale={"average": "mean"})
            declare(declaring, "Model", "m", tenant="default", scale={"average": "weighted"})
            await register(client)
            await eventually(lambda: conditions(declaring, "Model", "m").get("Applied") == ("True", "Applied"), "done")
            await eventually(
                lambda: bool(knative.services()) and scale_of(knative, "a", word) == "weighted-exponential",
                "the annotation",
            )
            status, problem = await client.admin("PUT", "/models/m/scale", {"average": "mean"})
            assert status == 400
            assert "Invalid enum value 'mean'" in problem["detail"]
            assert (await client.admin("PUT", "/models/m/scale", {"average": "linear"}))[0] == 200
            await eventually(lambda: scale_of(knative, "a", word) is None, "no annotation")


async def test_declared_backlog_reaches_activators(declaring: ApiServer, knative: FakeKnative, tmp_path: Path) -> None:
    """Activators get the backlog setting by the feed. The Service does not change."""
    with running(tmp_path):
        async with inside(tmp_path) as client, open_feed(client) as reader:
            with pytest.raises(Exception, match="backlogSeconds"):
                declare(declaring, "Model", "m", tenant="default", scale={"backlogSeconds": -1})
            await register(client)
            await eventually(lambda: bool(knative.services()), "its Service")
            before = knative.service("a")["spec"]
            declare(declaring, "Model", "m", tenant="default", scale={"backlogSeconds": 5})
            await until(reader, lambda line: [row.backlog_s for row in line.models] == [5.0])
            assert (await client.admin("PUT", "/models/m/scale", {"backlog_s": 0}))[0] == 200
            await until(reader, lambda line: [row.backlog_s for row in line.models] == [0.0])
            assert knative.service("a")["spec"] == before


async def test_a_tenant_is_made_and_goes(declaring: ApiServer, tmp_path: Path) -> None:
    """The tenant is created and deleted with its object."""
    with running(tmp_path):
        async with inside(tmp_path):
            made = declare(declaring, "Tenant", "acme", limits={"rpm": 60}, deletionPolicy="Delete")
            await eventually(lambda: conditions(declaring, "Tenant", "acme").get("Ready") == ("True", "Active"), "made")
            declaring.delete(made)
            await eventually(lambda: not declaring.objects(OURS, "Tenant"), "gone")


async def test_a_cluster_without_our_kinds(knative: FakeKnative, tmp_path: Path) -> None:
    """The control plane serves without our CRDs."""
    with running(tmp_path):
        async with inside(tmp_path) as client:
            await register(client)
            await eventually(lambda: len(knative.services()) == 1, "its Service")


async def test_events_tell_how_it_fares(declaring: ApiServer, knative: FakeKnative, tmp_path: Path) -> None:
    """Each change of state gives one event: a refused spec, a ready model, a ready version."""
    with running(tmp_path):
        async with inside(tmp_path) as client:
            declare(declaring, "Model", "m", tenant="default", prod="c" * 12)
            await register(client)
            ready, refused = ("Model", "Normal", "Ready", 1), ("Model", "Warning", "Refused", 1)
            want = {ready, refused, ("ModelVersion", "Normal", "Ready", 1)}
            await eventually(lambda: events(declaring) == want, "the events")
            before = len(declaring.objects("v1", "Event", NAMESPACE))
            declare(declaring, "Tenant", "acme")
            await eventually(lambda: events(declaring, "default") == {("Tenant", "Normal", "Ready", 1)}, "another")
            assert len(declaring.objects("v1", "Event", NAMESPACE)) == before == 3
