"""The manifests as objects: built by kustomize 5 where there is one, and the base as plain YAML anywhere."""

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
# An overlay's own store.
STORE_AT: Final = (
    "configMapGenerator:\n"
    "  - {{name: kelvin-snapshotter, namespace: kelvin, behavior: merge, literals: ['KELVIN_STORE={url}']}}\n"
)
_NEEDED: Final = 5  # kubectl 1.27 and later have it


@functools.cache
def kustomize() -> tuple[str, ...] | None:
    """The command that builds a directory, or None where there is none that is new enough."""
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
    assert done.stderr == ""  # what is deprecated is said there
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
    """The objects of a directory, each time new ones. A cell of YAML that stands twice in a mapping is an error."""
    return [each for each in yaml.load_all(_built(place), Loader=_Strict) if each]


def build_with_components(*components: str, more: str = "") -> list[Json]:
    """Those of an overlay that names the base and these, in this order; `more` is the rest of it. Likewise.

    Without `more`, `store-port` gets what it needs: a store whose URL names a port.
    """
    if "store-port" in components and "trial" not in components and not more:
        more = STORE_AT.format(url="s3://ours/versions?endpoint=https://s3.example.com:9000")
    return [each for each in yaml.load_all(_with(components, more), Loader=_Strict) if each]


def plain(place: Path = BASE) -> list[Json]:
    """What kustomize would make of it without names that tell contents: resources, generators, images, namespaces."""
    told = _kustomization(place)
    objects = [*_resources(place, told), *_generated(told)]
    for image in told.get("images", ()):
        for container in containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}@{image['digest']}"
    for each in objects if "namespace" in told else ():
        if each["kind"] == "Namespace":
            each["metadata"]["name"] = told["namespace"]
        else:
            each["metadata"]["namespace"] = told["namespace"]
    return objects


def knative(which: str = "base") -> list[Json]:
    """What Knative has to allow, as it is applied with the base, or with another overlay."""
    return built(MANIFESTS / "knative" / which) if kustomize() else plain(MANIFESTS / "knative" / which)


def crds() -> list[Json]:
    """The kinds that are ours."""
    return built(MANIFESTS / "crds") if kustomize() else plain(MANIFESTS / "crds")


def of_base() -> list[Json]:
    """The best that is to be had here."""
    return built(BASE) if kustomize() else plain()


def files() -> list[Path]:
    """Every file below `manifests/`."""
    return sorted(path for path in MANIFESTS.rglob("*") if path.is_file())


def pod_of(obj: Json) -> Json | None:
    """The pod's spec that a workload runs."""
    if obj["kind"] == "CronJob":
        obj = obj["spec"]["jobTemplate"]
    elif obj["kind"] not in ("Deployment", "DaemonSet", "StatefulSet", "Job"):
        return None
    found: Json = obj["spec"]["template"]["spec"]
    return found


def containers(objects: list[Json]) -> Iterator[Json]:
    """Of all pods, those that only begin one, too."""
    for pod in filter(None, map(pod_of, objects)):
        yield from pod.get("initContainers", ())
        yield from pod["containers"]


def find(objects: list[Json], kind: str, name: str, namespace: str | None = None) -> Json:
    """The one of that name, whatever hash ends it."""
    (found,) = [
        each
        for each in objects
        if each["kind"] == kind
        and re.fullmatch(rf"{re.escape(name)}(-[a-z0-9]{{10}})?", each["metadata"]["name"])
        and namespace in (None, each["metadata"].get("namespace"))
    ]
    return found


def _resources(place: Path, told: Json) -> Iterator[Json]:
    for name in told.get("resources", ()):
        path = place / name
        if path.is_dir():
            yield from plain(path)
        else:
            yield from (each for each in yaml.load_all(path.read_text(), Loader=_Strict) if each)


def _generated(told: Json) -> Iterator[Json]:
    for each in told.get("configMapGenerator", ()):
        data = dict(literal.split("=", 1) for literal in each["literals"])
        about = {"name": each["name"], "namespace": each["namespace"]}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def _kustomization(place: Path) -> Json:
    told: Json = yaml.load((place / "kustomization.yaml").read_text(), Loader=_Strict)
    return told


def _major(command: list[str]) -> int:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return 0
    found = re.search(r"(?:^|Kustomize Version: )v(\d+)\.", said)
    return int(found[1]) if found else 0


class _Strict(yaml.CSafeLoader):
    """As an API server reads: a key that stands twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key stands twice"
        return super().construct_mapping(node, deep)
