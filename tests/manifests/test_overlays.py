"""Every overlay builds with kustomize 5 (kubectl 1.27 or later), and follows the rules of the base."""

import contextlib
import re
from typing import Final

import pytest

from controlplane.knative.cluster_settings import read_cluster
from tests.manifests import rules
from tests.manifests.component_effects import AGENT, EFFECTS, Effect, container, env_of, pod, renders
from tests.manifests.kustomize_build import (
    BASE,
    MANIFESTS,
    OVERLAYS,
    ROOT,
    Json,
    build_with_components,
    built,
    containers,
    find,
    knative,
    kustomize,
    plain,
    pod_of,
)
from tests.manifests.network_reach import Pod, may
from tests.manifests.pod_processes import environment_of
from tests.manifests.schemas import problems
from tests.manifests.test_network_reach import ACTIVATOR, CONTROLPLANE, REPLICA, SNAPSHOTTER
from tests.manifests.test_settings import BESIDE_BYTES, commands, room_beside_the_host_tier, unknown, unused

pytestmark = pytest.mark.skipif(kustomize() is None, reason="no kustomize 5: kubectl 1.27 or later has it")

INSTALL_PAGE: Final = ROOT / "docs" / "operations" / "cluster-install.md"
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
# Images by version, without a digest: the trial's own services, and images that are loaded into nodes.
VERSIONED = re.compile(r"(docker\.io/library|quay\.io/minio)/[a-z]+:\D*\d[\w.-]+|kelvin\.local/kelvin(-runtime)?:trial")


# The rules that a component breaks on purpose.
GIVEN_UP = {"cache-agent": ["containment: hostPID of the node", "containment: data: a directory of the node"]}


def _overlay(name: str) -> list[Json]:
    return built(MANIFESTS / "overlays" / name)


def _harmless(name: str, fault: str) -> bool:
    image = re.fullmatch(r"images: [a-z0-9]+: (\S+)", fault)
    return name in ("kind", "trial") and image is not None and VERSIONED.fullmatch(image[1]) is not None


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_builds_and_breaks_no_rule(name: str) -> None:
    """It builds without a warning, fits strict schemas, and breaks no rule."""
    objects = _overlay(name)
    assert [each for obj in objects for each in problems(obj)] == []
    assert [each for each in rules.find_broken_rules(objects) if not _harmless(name, each)] == []
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_settings_are_known(name: str) -> None:
    """The product knows every setting. Objects of other software are not checked."""
    ours = [each for each in _overlay(name) if each["kind"] != "StatefulSet"]
    assert unknown(ours) == []
    assert unused(ours) == []
    assert commands(ours) == []
    assert read_cluster(env_of(ours, "controlplane"), 1) is not None
    stores = [env_of(ours, "controlplane")["KELVIN_CLUSTER_STORE"], env_of(ours, "snapshotter")["KELVIN_STORE"]]
    assert stores[0] == stores[1]
    engine = container(ours, "snapshotter", "engine")
    assert (engine["image"], environment_of(ours, engine)["KELVIN_STORE"]) == (renders(ours).image, stores[0])
    assert room_beside_the_host_tier(ours) >= BESIDE_BYTES


def test_without_kustomize() -> None:
    """Plain YAML gives the same objects as kustomize."""

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
def test_each_component_is_tried(name: str) -> None:
    """It is built with the base. Components that need foreign CRDs have no overlay, since a cluster may lack them."""
    if name in OVERLAYS:
        text = (MANIFESTS / "overlays" / name / "kustomization.yaml").read_text()
        assert f"../../components/{name}" in text
        return
    objects = build_with_components(name)
    assert [each for obj in objects for each in problems(obj)] == []
    assert rules.find_broken_rules(objects) == GIVEN_UP.get(name, [])
    assert (unknown(objects), unused(objects), commands(objects)) == ([], [], [])
    assert read_cluster(env_of(objects, "controlplane"), 1) is not None


def test_what_trials_stand_on() -> None:
    """Only their users reach the trial's database, Redis and store."""
    objects = _overlay("trial")
    inside = {name: Pod("kelvin", {"app.kubernetes.io/name": name}) for name in ("postgres", "redis", "s3")}
    used = {
        ("postgres", 5432): [CONTROLPLANE],
        ("redis", 6379): [ACTIVATOR],
        ("s3", 9000): [SNAPSHOTTER, REPLICA, AGENT],
    }
    for (name, port), users in used.items():
        for each in (ACTIVATOR, CONTROLPLANE, SNAPSHOTTER, REPLICA, AGENT, Pod("elsewhere")):
            assert may(objects, each, inside[name], port) is (each in users), (each, name)


@pytest.mark.parametrize(
    ("name", "does"), EFFECTS, ids=[f"{name} {number}" for number, (name, _) in enumerate(EFFECTS)]
)
def test_what_a_component_does(name: str, does: Effect) -> None:
    """The effect is there with the component, and not without."""
    assert does(build_with_components(name))
    with contextlib.suppress(KeyError, ValueError):  # the object does not exist either
        assert not does(built(BASE))


def test_kind_overlay_adds_ports_and_images() -> None:
    """It adds a port of the machine, reserves less, has fewer activators, and uses loaded images, also for replicas."""
    objects = _overlay("kind")
    assert find(objects, "Service", "activator")["spec"]["ports"][0]["nodePort"] == 30443
    assert pod(objects, "activator")["containers"][0]["resources"]["requests"]["cpu"] == "100m"
    assert find(objects, "HorizontalPodAutoscaler", "activator")["spec"]["maxReplicas"] == 2
    images = {each["image"] for each in containers(objects) if VERSIONED.fullmatch(each["image"]) is None}
    skipped = find(knative("kind"), "ConfigMap", "config-deployment")["data"]["registries-skipping-tag-resolving"]
    loaded = {pod(objects, "activator")["containers"][0]["image"], renders(objects).image}
    assert images == set()
    assert {each.partition("/")[0] for each in loaded} <= set(skipped.split(","))
    (command,) = re.findall(r"^kind load docker-image (.*)$", INSTALL_PAGE.read_text(), re.MULTILINE)
    assert set(command.split()) == loaded
