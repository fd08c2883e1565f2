"""The kinds that are served: built-in ones that the product uses, and those of CustomResourceDefinitions."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.cluster.kube_api.field_sets import Schema
from tests.cluster.kube_api.status_answers import Json, ObjectRef
from tests.cluster.kube_api.structural_schemas import of_model, with_metadata

KNATIVE: Final = Path(__file__).parent / "data" / "knative-crds.jsonl"
VERBS: Final = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
# In the order in which an API server lists them for custom resources.
CUSTOM_VERBS: Final = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind in one version."""

    group: str
    version: str
    plural: str
    kind: str
    schema: Schema = field(repr=False, compare=False, hash=False)
    namespaced: bool = True
    custom: bool = False
    has_status: bool = False
    generations: bool = False  # metadata.generation counts its changes
    returned: bool = False  # a DELETE returns the object
    singular: str = ""
    short: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    @property
    def stored(self) -> tuple[str, str]:
        """The storage of the kind, which all its versions share."""
        return self.group, self.plural

    def named(self, name: str = "") -> ObjectRef:
        return ObjectRef(self.group, self.plural, self.kind, name)

    def listed(self) -> list[Json]:
        """Return the kind's entries for discovery."""
        entry: Json = {
            "name": self.plural,
            "singularName": self.singular or self.kind.lower(),
            "namespaced": self.namespaced,
            "kind": self.kind,
            "verbs": list(CUSTOM_VERBS if self.custom else VERBS),
        }
        if self.short:
            entry["shortNames"] = list(self.short)
        if self.categories:
            entry["categories"] = list(self.categories)
        digest = hashlib.sha256(f"{self.api_version}/{self.kind}".encode()).digest()
        entry["storageVersionHash"] = base64.b64encode(digest[:8]).decode()
        found = [entry]
        if self.has_status:
            about: Json = {"name": f"{self.plural}/status", "singularName": "", "namespaced": self.namespaced}
            found.append(about | {"kind": self.kind, "verbs": ["get", "patch", "update"]})
        return found


def _built_in(group: str, version: str, plural: str, model: str, **more: Any) -> Kind:
    kind = model[2:] if model.startswith(("V1", "V2")) else model
    kind = {"CoreV1Event": "Event", "DiscoveryV1EndpointSlice": "EndpointSlice"}.get(model, kind)
    return Kind(group, version, plural, kind, of_model(model), **more)


BUILT_IN: Final = (
    _built_in("", "v1", "namespaces", "V1Namespace", namespaced=False, has_status=True, returned=True, short=("ns",)),
    _built_in("", "v1", "pods", "V1Pod", has_status=True, generations=True, returned=True, short=("po",)),
    _built_in("", "v1", "events", "CoreV1Event", short=("ev",)),
    _built_in("", "v1", "configmaps", "V1ConfigMap", short=("cm",)),
    _built_in("", "v1", "secrets", "V1Secret"),
    _built_in("", "v1", "nodes", "V1Node", namespaced=False, has_status=True, short=("no",)),
    _built_in("discovery.k8s.io", "v1", "endpointslices", "V1EndpointSlice", generations=True),
    _built_in("coordination.k8s.io", "v1", "leases", "V1Lease"),
    _built_in("networking.k8s.io", "v1", "networkpolicies", "V1NetworkPolicy", generations=True, short=("netpol",)),
    _built_in(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "V1CustomResourceDefinition",
        namespaced=False,
        has_status=True,
        generations=True,
        short=("crd", "crds"),
    ),
)


def defined(definition: Json) -> list[Kind]:
    """Return the kinds of a CustomResourceDefinition, one for each served version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Kind(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            schema=with_metadata(version.get("schema", {}).get("openAPIV3Schema", {})),
            namespaced=spec["scope"] == "Namespaced",
            custom=True,
            has_status="status" in version.get("subresources", {}),
            generations=True,
            singular=names.get("singular", ""),
            short=tuple(names.get("shortNames", ())),
            categories=tuple(names.get("categories", ())),
        )
        for version in spec["versions"]
        if version["served"]
    ]


def knative() -> list[Json]:
    """Return Knative Serving's CRDs, without their descriptions."""
    return [json.loads(line) for line in KNATIVE.read_text().splitlines()]


class Kinds:
    """The kinds that are served now. Not locked; the owner does that."""

    def __init__(self) -> None:
        self._known = {(each.group, each.version, each.plural): each for each in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        return self._known.get((group, version, plural))

    def of(self, api_version: str, kind: str) -> Kind:
        """Return a kind. Raises KeyError."""
        for each in self._known.values():
            if (each.api_version, each.kind) == (api_version, kind):
                return each
        raise KeyError(api_version, kind)

    def all(self) -> list[Kind]:
        return list(self._known.values())

    def define(self, definition: Json) -> None:
        self.forget(definition)
        for each in defined(definition):
            self._known[each.group, each.version, each.plural] = each

    def of_definition(self, definition: Json) -> Kind:
        """Return the kind of a CRD in its first served version."""
        return self.of(*((found := defined(definition)[0]).api_version, found.kind))

    def forget(self, definition: Json) -> None:
        spec = definition["spec"]
        for key in [key for key in self._known if (key[0], key[2]) == (spec["group"], spec["names"]["plural"])]:
            del self._known[key]

    def discover(self, path: str) -> Json | None:
        """Return the response for a discovery path, or None for another path."""
        groups: dict[str, list[str]] = {}
        for each in self._known.values():
            versions = groups.setdefault(each.group, [])
            if each.version not in versions:
                versions.append(each.version)
        match path.strip("/").split("/"):
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                named = [_group(name, versions) for name, versions in groups.items() if name]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
            case ["apis", name] if name in groups:
                return {"kind": "APIGroup", "apiVersion": "v1"} | _group(name, groups[name])
            case ["api", "v1"]:
                return self._resources("", "v1")
            case ["apis", name, version] if version in groups.get(name, []):
                return self._resources(name, version)
        return None

    def _resources(self, group: str, version: str) -> Json:
        found = [each for each in self._known.values() if (each.group, each.version) == (group, version)]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": found[0].api_version,
            "resources": [entry for each in found for entry in each.listed()],
        }


def _group(name: str, versions: list[str]) -> Json:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in sorted(versions)]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}
