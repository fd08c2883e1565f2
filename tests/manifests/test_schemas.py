"""Each object is one that an API server takes with strict field validation; what it would refuse is told."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.manifests.kustomize_build import Json, files, find, of_base, plain, pod_of
from tests.manifests.schemas import problems

Harm = Callable[[list[Json]], object]


def _told(objects: list[Json]) -> list[str]:
    return [each for obj in objects for each in problems(obj)]


def test_base_fits_its_schemas() -> None:
    """As plain YAML and as it is built."""
    assert _told(plain()) == []
    assert _told(of_base()) == []


def test_names_are_told_once() -> None:
    """No two objects are one."""
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in of_base()]
    assert len(names) == len(set(names))


def test_manifests_hold_only_referenced_yaml() -> None:
    """`manifests/` holds nothing else, and no file that nothing names."""
    assert {path.suffix for path in files()} == {".yaml"}
    for directory in {path.parent for path in files()}:
        named = (directory / "kustomization.yaml").read_text()
        assert [path.name for path in directory.glob("*.yaml") if path.name not in named] in (
            [],
            ["kustomization.yaml"],
        )


def _container(objects: list[Json]) -> Json:
    pod = pod_of(find(objects, "Deployment", "activator"))
    assert pod is not None
    found: Json = pod["containers"][0]
    return found


def _put(target: Json, **values: Any) -> None:
    target.update(values)


HARMS: tuple[tuple[Harm, str], ...] = (
    (lambda o: _put(_container(o), imagePullPolcy="Always"), "imagePullPolcy: is no field of V1Container"),
    (lambda o: _put(_container(o)["resources"]["limits"], cpu=2), ".limits.cpu: 2 must be str"),
    (lambda o: _put(_container(o)["readinessProbe"], periodSeconds="2"), ".periodSeconds: '2' must be int"),
    (lambda o: _put(_container(o)["readinessProbe"], periodSeconds=True), ".periodSeconds: True must be int"),
    (lambda o: _container(o).pop("name"), ".containers[0].name: must be there"),
    (lambda o: _put(_container(o), ports={"https": 8443}), ".ports: must be a list"),
    (lambda o: _put(_container(o), lifecycle=[]), ".lifecycle: must be a mapping"),
    (lambda o: find(o, "Service", "activator").update(status2={}), ".status2: is no field of V1Service"),
    (lambda o: find(o, "ConfigMap", "kelvin-common")["data"].update(x=600), ".data.x: 600 must be str"),
    (lambda o: find(o, "Service", "activator").update(kind="Servise"), "v1 is no kind that is known"),
    (lambda o: find(o, "Deployment", "activator").update(apiVersion="apps/v9"), "apps/v9 is no kind"),
)


@pytest.mark.parametrize(("harm", "said"), HARMS, ids=[said for _, said in HARMS])
def test_invalid_manifest_is_refused_with_its_path(harm: Harm, said: str) -> None:
    """A field that there is not, one of another type, one that is missing: each with its path."""
    objects = copy.deepcopy(plain())
    harm(objects)
    assert [each for each in _told(objects) if said in each]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param(
            {"selector": {"matchLabels": {"a": "b"}}, "podMetricsEndpoints": [{"port": "health"}]}, [], id="a good one"
        ),
        pytest.param(
            {"selector": {}}, ["PodMonitor x: .spec.podMetricsEndpoints: must be there"], id="without its endpoints"
        ),
        pytest.param(
            {"selector": {}, "podMetricsEndpoints": [{"prot": "health"}]},
            ["PodMonitor x: .spec.podMetricsEndpoints[0].prot: is no field"],
            id="a field that there is not",
        ),
    ],
)
def test_kinds_of_others(spec: Json, said: list[str]) -> None:
    """By what their projects publish."""
    about = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "x"}}
    assert problems({**about, "spec": spec}) == said
