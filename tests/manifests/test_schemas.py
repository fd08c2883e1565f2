"""Each object passes strict field validation, and invalid ones are reported."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.manifests.kustomize_build import Json, files, find, of_base, plain, pod_of
from tests.manifests.schemas import problems

Harm = Callable[[list[Json]], object]


def _all_problems(objects: list[Json]) -> list[str]:
    return [each for obj in objects for each in problems(obj)]


def test_base_fits_its_schemas() -> None:
    """This holds for plain YAML and for the built objects."""
    assert _all_problems(plain()) == []
    assert _all_problems(of_base()) == []


def test_object_names_are_unique() -> None:
    """No two objects have the same kind, namespace and name."""
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in of_base()]
    assert len(names) == len(set(names))


def test_manifests_hold_only_referenced_yaml() -> None:
    """Every file is YAML and is named in its kustomization."""
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


@pytest.mark.parametrize(("harm", "fault"), HARMS, ids=[fault for _, fault in HARMS])
def test_invalid_manifest_is_refused_with_its_path(harm: Harm, fault: str) -> None:
    """The faults are an unknown field, a wrong type and a missing field."""
    objects = copy.deepcopy(plain())
    harm(objects)
    assert [each for each in _all_problems(objects) if fault in each]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        pytest.param(
            {"selector": {"matchLabels": {"a": "b"}}, "podMetricsEndpoints": [{"port": "health"}]}, [], id="a good one"
        ),
        pytest.param(
            {"selector": {}}, ["PodMonitor x: .spec.podMetricsEndpoints: must be there"], id="missing endpoints"
        ),
        pytest.param(
            {"selector": {}, "podMetricsEndpoints": [{"prot": "health"}]},
            ["PodMonitor x: .spec.podMetricsEndpoints[0].prot: is no field"],
            id="an unknown field",
        ),
    ],
)
def test_kinds_of_others(spec: Json, fault: list[str]) -> None:
    """The schemas are those that other projects publish."""
    about = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "x"}}
    assert problems({**about, "spec": spec}) == fault
