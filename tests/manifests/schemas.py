"""Strict schemas of objects: fields exist, have their type, and required ones are there.

Core kinds use the models of the `kubernetes` client, generated from the API server's OpenAPI document. Other kinds use
their projects' published schemas, as far as we need them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kubernetes import client

Json = dict[str, Any]

_SCALARS: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "datetime": (str,), "object": (object,),
}  # fmt: skip
_CORE: Final = re.compile(r"v\d+|[a-z0-9.]+(\.k8s\.io)?/v\d+")
# Leaves are names of scalars; {"*": x} allows any keys; [x] is a list. A name that ends with ! is required.
_LABELS: Final = {"*": "str"}
_SELECTOR: Final = {"matchLabels": _LABELS}
FOREIGN: Final[Mapping[tuple[str, str], Json]] = {
    # prometheus-operator, Documentation/api-reference: PodMonitorSpec
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector!": _SELECTOR,
        "namespaceSelector": {"matchNames": ["str"], "any": "bool"},
        "podMetricsEndpoints!": [
            {"port": "str", "path": "str", "interval": "str", "scrapeTimeout": "str", "scheme": "str"}
        ],
    },
    # cert-manager, reference/api-docs: IssuerSpec, CertificateSpec
    ("cert-manager.io/v1", "ClusterIssuer"): {"selfSigned": {}, "ca": {"secretName!": "str"}},
    ("cert-manager.io/v1", "Certificate"): {
        "secretName!": "str",
        "issuerRef!": {"name!": "str", "kind": "str", "group": "str"},
        "isCA": "bool",
        "commonName": "str",
        "dnsNames": ["str"],
        "uris": ["str"],
        "usages": ["str"],
        "duration": "str",
        "renewBefore": "str",
        "privateKey": {"algorithm": "str", "size": "int", "rotationPolicy": "str"},
    },
    # istio, reference/config/security/peer_authentication: PeerAuthentication
    ("security.istio.io/v1", "PeerAuthentication"): {
        "selector": _SELECTOR,
        "mtls": {"mode!": "str"},
        "portLevelMtls": {"*": {"mode!": "str"}},
    },
}


def problems(obj: Json) -> list[str]:
    """Return what an API server with strict field validation would refuse, each with its path."""
    about = f"{obj.get('kind')} {obj.get('metadata', {}).get('name')}"
    return [f"{about}: {each}" for each in _problems(obj)]


def model_of(api_version: str, kind: str) -> type[Any] | None:
    """Return the class of a core kind, or None for another kind."""
    if not _CORE.fullmatch(api_version):
        return None
    found = getattr(client, api_version.rpartition("/")[2].capitalize() + kind, None)
    return found if isinstance(found, type) else None


def _problems(obj: Json) -> Iterator[str]:
    key = (str(obj.get("apiVersion")), str(obj.get("kind")))
    if (model := model_of(*key)) is not None:
        yield from _by_model(obj, model.__name__, "")
    elif (spec := FOREIGN.get(key)) is not None:
        yield from _by_model(obj.get("metadata", {}), "V1ObjectMeta", ".metadata")
        yield from _by_shape(obj.get("spec", {}), spec, ".spec")
        yield from (f".{name}: is no field" for name in obj.keys() - {"apiVersion", "kind", "metadata", "spec"})
    else:
        yield f"{key[0]} is no kind that is known"


def _by_model(value: Any, wanted: str, path: str) -> Iterator[str]:
    if inner := re.fullmatch(r"List\[(.+)\]", wanted):
        if not isinstance(value, list):
            yield f"{path}: must be a list"
            return
        for number, each in enumerate(value):
            yield from _by_model(each, inner[1], f"{path}[{number}]")
    elif inner := re.fullmatch(r"Dict\[str, (.+)\]", wanted):
        if not isinstance(value, dict):
            yield f"{path}: must be a mapping"
            return
        for name, each in value.items():
            yield from _by_model(each, inner[1], f"{path}.{name}")
    elif wanted in _SCALARS:
        good = isinstance(value, _SCALARS[wanted]) and (wanted != "int" or not isinstance(value, bool))
        if not good:
            yield f"{path}: {value!r} must be {wanted}"
    else:
        yield from _fields(value, getattr(client, wanted), path)


def _fields(value: Any, model: type[Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: must be a mapping"
        return
    attributes: dict[str, str] = vars(model)["attribute_map"]
    types: dict[str, str] = vars(model)["openapi_types"]
    named = {name: attribute for attribute, name in attributes.items()}
    for name, each in value.items():
        if name not in named:
            yield f"{path}.{name}: is no field of {model.__name__}"
        else:
            yield from _by_model(each, types[named[name]], f"{path}.{name}")
    fields: dict[str, Any] = model.model_fields
    needed = {attributes.get(attribute, attribute) for attribute, each in fields.items() if each.is_required()}
    yield from (f"{path}.{name}: must be there" for name in sorted(needed - value.keys()))


def _by_shape(value: Any, shape: Any, path: str) -> Iterator[str]:
    if isinstance(shape, str):
        if not isinstance(value, _SCALARS[shape]):
            yield f"{path}: {value!r} must be {shape}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path}: must be a list"
            return
        for number, each in enumerate(value):
            yield from _by_shape(each, shape[0], f"{path}[{number}]")
    elif not isinstance(value, dict):
        yield f"{path}: must be a mapping"
    else:
        known = {name.rstrip("!"): inner for name, inner in shape.items()}
        for name, each in value.items():
            if name not in known and "*" not in known:
                yield f"{path}.{name}: is no field"
            else:
                yield from _by_shape(each, known.get(name, known.get("*")), f"{path}.{name}")
        missing = [name for name in shape if name.endswith("!") and name[:-1] not in value]
        yield from (f"{path}.{name[:-1]}: must be there" for name in missing)
