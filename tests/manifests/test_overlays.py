"""Every overlay is built by kustomize 5 (kubectl 1.27 or later), and is held to what the base is held to."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from controlplane.cluster_settings import read_cluster
from controlplane.policy.knative_service import Cluster
from tests.manifests import rules
from tests.manifests.built import BASE, MANIFESTS, OVERLAYS, Json, built, find, kustomize, plain, pod_of
from tests.manifests.pods import environment_of
from tests.manifests.reach import Pod, may
from tests.manifests.schemas import problems
from tests.manifests.test_reach import ACTIVATOR, CONTROLPLANE, REPLICA, SNAPSHOTTER
from tests.manifests.test_settings import commands, unknown, unused

pytestmark = pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")

COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
# By version where nobody here knows a digest: what trials stand on, and what was loaded into nodes.
VERSIONED = re.compile(r"(docker\.io/library|quay\.io/minio)/[a-z]+:\D*\d[\w.-]+|kelvin\.local/kelvin:trial")


# What a component gives up, and nothing beyond it.
GIVEN_UP = {"cache-agent": ["containment: hostPID of the node", "containment: data: a directory of the node"]}


def _overlay(name: str) -> list[Json]:
    return built(MANIFESTS / "overlays" / name)


def _harmless(name: str, told: str) -> bool:
    image = re.fullmatch(r"images: [a-z0-9]+: (\S+)", told)
    return name in ("kind", "trial") and image is not None and VERSIONED.fullmatch(image[1]) is not None


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay(name: str) -> None:
    """Builds without a warning, is taken by a strict API server, and breaks no rule."""
    objects = _overlay(name)
    assert [each for obj in objects for each in problems(obj)] == []
    assert [each for each in rules.broken(objects) if not _harmless(name, each)] == []
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", OVERLAYS)
def test_its_settings(name: str) -> None:
    """Known to the product; what isn't ours has its own."""
    ours = [each for each in _overlay(name) if each["kind"] != "StatefulSet"]
    assert unknown(ours) == []
    assert unused(ours) == []
    assert commands(ours) == []
    assert read_cluster(_told(ours, "controlplane"), 1) is not None
    stores = [_told(ours, "controlplane")["KELVIN_CLUSTER_STORE"], _told(ours, "snapshotter")["KELVIN_STORE"]]
    assert stores[0] == stores[1]


def _told(objects: list[Json], name: str) -> Mapping[str, str]:
    return environment_of(objects, _pod(objects, name)["containers"][0])


def test_without_kustomize() -> None:
    """What reads the base as plain YAML sees the objects that kustomize makes."""

    def heads(objects: list[Json]) -> list[tuple[str, ...]]:
        unhashed = (re.sub(r"^(kelvin-[a-z]+)-[a-z0-9]{10}$", r"\1", each["metadata"]["name"]) for each in objects)
        return sorted((each["kind"], name) for each, name in zip(objects, unhashed, strict=True))

    assert heads(plain()) == heads(built(BASE))
    (first,) = (pod_of(find(objects, "Deployment", "activator")) for objects in [plain()])
    (other,) = (pod_of(find(objects, "Deployment", "activator")) for objects in [built(BASE)])
    assert first is not None
    assert other is not None
    assert first["containers"][0]["image"] == other["containers"][0]["image"]


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_is_tried(name: str, tmp_path: Path) -> None:
    """With the base; those that need other projects' kinds have no overlay, as a cluster may lack these."""
    if name in OVERLAYS:
        text = (MANIFESTS / "overlays" / name / "kustomization.yaml").read_text()
        assert f"../../components/{name}" in text
        return
    there = os.path.relpath(MANIFESTS.resolve(), tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{there}/base]\ncomponents: [{there}/components/{name}]\n"
    )
    objects = built(tmp_path)
    assert [each for obj in objects for each in problems(obj)] == []
    assert rules.broken(objects) == GIVEN_UP.get(name, [])
    assert (unknown(objects), unused(objects), commands(objects)) == ([], [], [])
    assert read_cluster(_told(objects, "controlplane"), 1) is not None


def _database(objects: list[Json]) -> bool:
    return may(objects, CONTROLPLANE, Pod("kelvin", {"app.kubernetes.io/name": "postgres"}), 5432)


def test_what_trials_stand_on() -> None:
    """Each is reached by who uses it, and by nobody else."""
    objects = _overlay("trial")
    inside = {name: Pod("kelvin", {"app.kubernetes.io/name": name}) for name in ("postgres", "redis", "s3")}
    used = {("postgres", 5432): [CONTROLPLANE], ("redis", 6379): [ACTIVATOR], ("s3", 9000): [SNAPSHOTTER, REPLICA]}
    for (name, port), users in used.items():
        for each in (ACTIVATOR, CONTROLPLANE, SNAPSHOTTER, REPLICA, Pod("elsewhere")):
            assert may(objects, each, inside[name], port) is (each in users), (each, name)


ZONES = "topology.kubernetes.io/zone"
DOES: tuple[tuple[str, Callable[[list[Json]], bool]], ...] = (
    (
        "multi-zone",
        lambda o: all(
            [(each["topologyKey"], each["whenUnsatisfiable"]) for each in _pod(o, name)["topologySpreadConstraints"]]
            == [(ZONES, "DoNotSchedule")]
            for name in ("activator", "controlplane")
        ),
    ),
    ("multi-zone", lambda o: find(o, "HorizontalPodAutoscaler", "activator")["spec"]["minReplicas"] == 3),
    ("mesh", lambda o: find(o, "Namespace", "kelvin")["metadata"]["labels"]["istio-injection"] == "enabled"),
    ("mesh", lambda o: find(o, "PeerAuthentication", "kelvin")["spec"]["mtls"]["mode"] == "STRICT"),
    ("kind", lambda o: find(o, "Service", "activator")["spec"]["ports"][0].get("nodePort") == 30443),
    ("kind", lambda o: _pod(o, "activator")["containers"][0]["resources"]["requests"]["cpu"] == "100m"),
    ("trial", _database),
    ("gpu", lambda o: _renders(o).device == "nvidia.com/gpu"),
    ("mig", lambda o: _renders(o).device == "nvidia.com/mig-1g.10gb"),
    ("spot", lambda o: _renders(o).node_selector == {"kelvin.dev/capacity": "spot"}),
    ("gpu", lambda o: "nodeAffinity" in _pod(o, "snapshotter").get("affinity", {})),
    ("spot", lambda o: "nodeAffinity" in _pod(o, "activator")["affinity"]),
)


def _renders(objects: list[Json]) -> Cluster:
    """Where replicas are to run, as the control plane reads it."""
    found = read_cluster(_told(objects, "controlplane"), 1)
    assert found is not None
    return found.pods


def _pod(objects: list[Json], name: str) -> Json:
    found = pod_of(find(objects, "Deployment", name))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "does"), DOES, ids=[f"{name} {number}" for number, (name, _) in enumerate(DOES)])
def test_what_an_overlay_does(name: str, does: Callable[[list[Json]], bool]) -> None:
    """It is there with it, and not without."""
    assert does(_overlay(name))
    with contextlib.suppress(KeyError, ValueError):  # the object is not there either
        assert not does(built(BASE))
