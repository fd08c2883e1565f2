"""The manifests as objects: built by kustomize 5 if it is installed, and the base as plain YAML otherwise."""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

Json = dict[str, Any]

ROOT: Final = Path(__file__).parents[2]
MANIFESTS: Final = ROOT / "manifests"
BASE: Final = MANIFESTS / "base"
OVERLAYS: Final = tuple(sorted(path.name for path in (MANIFESTS / "overlays").glob("*") if path.is_dir()))
# The part of an overlay that sets its own store.
STORE_AT: Final = (
    "configMapGenerator:\n"
    "  - {{name: kelvin-snapshotter, namespace: kelvin, behavior: merge, literals: ['KELVIN_STORE={url}']}}\n"
)
_NEEDED: Final = 5  # kubectl 1.27 and later have it


@functools.cache
def kustomize() -> tuple[str, ...] | None:
    """Return the command that builds a directory, or None without a recent kustomize or kubectl."""
    if (alone := shutil.which("kustomize")) and _major([alone, "version"]) >= _NEEDED:
        return (alone, "build")
    kubectl = shutil.which("kubectl")
    if kubectl and _major([kubectl, "version", "--client"]) >= _NEEDED:
        return (kubectl, "kustomize")
    return None


@functools.cache
def _built(place: Path) -> str:
    command = kustomize()
    assert command is not None
    done = subprocess.run([*command, str(place)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # deprecation warnings are written there
    return done.stdout


@functools.cache
def _with(components: tuple[str, ...], more: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        there = os.path.relpath(MANIFESTS.resolve(), Path(place).resolve())
        Path(place, "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
            f"resources: [{there}/base]\n"
            f"components: [{', '.join(f'{there}/components/{each}' for each in components)}]\n{more}"
        )
        return _built(Path(place))


def built(place: Path) -> list[Json]:
    """Return new copies of a directory's objects. A repeated key in the YAML is an error."""
    return [each for each in yaml.load_all(_built(place), Loader=_Strict) if each]


def build_with_components(*components: str, more: str = "") -> list[Json]:
    """Return the objects of an overlay with the base and these components in order; `more` is the rest of its file.

    Without `more`, `store-port` gets what it needs: a store whose URL names a port.
    """
    if "store-port" in components and "trial" not in components and not more:
        more = STORE_AT.format(url="s3://ours/versions?endpoint=https://s3.example.com:9000")
    return [each for each in yaml.load_all(_with(components, more), Loader=_Strict) if each]


def plain(place: Path = BASE) -> list[Json]:
    """Return kustomize's result without content hashes: resources, generators, images and namespaces only."""
    kustomization = _kustomization(place)
    objects = [*_resources(place, kustomization), *_generated(kustomization)]
    for image in kustomization.get("images", ()):
        for container in containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}@{image['digest']}"
    for each in objects if "namespace" in kustomization else ():
        if each["kind"] == "Namespace":
            each["metadata"]["name"] = kustomization["namespace"]
        else:
            each["metadata"]["namespace"] = kustomization["namespace"]
    return objects


def knative(which: str = "base") -> list[Json]:
    """Return Knative's ConfigMaps that are applied with the base, or with another overlay."""
    return built(MANIFESTS / "knative" / which) if kustomize() else plain(MANIFESTS / "knative" / which)


def crds() -> list[Json]:
    """Return our CRDs."""
    return built(MANIFESTS / "crds") if kustomize() else plain(MANIFESTS / "crds")


def of_base() -> list[Json]:
    """Return the base's objects, built if possible, plain otherwise."""
    return built(BASE) if kustomize() else plain()


def files() -> list[Path]:
    """Return every file below `manifests/`."""
    return sorted(path for path in MANIFESTS.rglob("*") if path.is_file())


def pod_of(obj: Json) -> Json | None:
    """Return the pod spec of a workload, or None for another kind."""
    if obj["kind"] == "CronJob":
        obj = obj["spec"]["jobTemplate"]
    elif obj["kind"] not in ("Deployment", "DaemonSet", "StatefulSet", "Job"):
        return None
    found: Json = obj["spec"]["template"]["spec"]
    return found


def containers(objects: list[Json]) -> Iterator[Json]:
    """Yield the containers of all pods, init containers included."""
    for pod in filter(None, map(pod_of, objects)):
        yield from pod.get("initContainers", ())
        yield from pod["containers"]


def find(objects: list[Json], kind: str, name: str, namespace: str | None = None) -> Json:
    """Return the object of that name, with or without a content hash."""
    (found,) = [
        each
        for each in objects
        if each["kind"] == kind
        and re.fullmatch(rf"{re.escape(name)}(-[a-z0-9]{{10}})?", each["metadata"]["name"])
        and namespace in (None, each["metadata"].get("namespace"))
    ]
    return found


def _resources(place: Path, kustomization: Json) -> Iterator[Json]:
    for name in kustomization.get("resources", ()):
        path = place / name
        if path.is_dir():
            yield from plain(path)
        else:
            yield from (each for each in yaml.load_all(path.read_text(), Loader=_Strict) if each)


def _generated(kustomization: Json) -> Iterator[Json]:
    for each in kustomization.get("configMapGenerator", ()):
        data = dict(literal.split("=", 1) for literal in each["literals"])
        about = {"name": each["name"], "namespace": each["namespace"]}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def _kustomization(place: Path) -> Json:
    kustomization: Json = yaml.load((place / "kustomization.yaml").read_text(), Loader=_Strict)
    return kustomization


def _major(command: list[str]) -> int:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return 0
    found = re.search(r"(?:^|Kustomize Version: )v(\d+)\.", output)
    return int(found[1]) if found else 0


class _Strict(yaml.CSafeLoader):
    """Loads YAML as an API server does: a repeated key is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key stands twice"
        return super().construct_mapping(node, deep)
