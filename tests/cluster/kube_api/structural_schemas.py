"""Structural schemas: unknown fields, refusals and defaults (apiextensions-apiserver).

Expressions (`x-kubernetes-validations`) are not evaluated. Schemas of built-in kinds come from the classes of the
`kubernetes` client: fields, types and which lists are maps, but not required fields.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from kubernetes.client import models

from tests.cluster.kube_api.field_sets import Schema, of_field
from tests.cluster.kube_api.status_answers import Cause

MAP_LISTS: Final[dict[tuple[str, str], list[str]]] = {
    ("V1ObjectMeta", "ownerReferences"): ["uid"],
    ("V1PodSpec", "containers"): ["name"],
    ("V1PodSpec", "initContainers"): ["name"],
    ("V1PodSpec", "volumes"): ["name"],
    ("V1PodSpec", "imagePullSecrets"): ["name"],
    ("V1PodStatus", "conditions"): ["type"],
    ("V1Container", "env"): ["name"],
    ("V1Container", "ports"): ["containerPort", "protocol"],
    ("V1Container", "volumeMounts"): ["mountPath"],
    ("V1NamespaceStatus", "conditions"): ["type"],
    ("V1CustomResourceDefinitionStatus", "conditions"): ["type"],
}
SET_LISTS: Final = {("V1ObjectMeta", "finalizers")}
ATOMIC_MAPS: Final = {
    "V1LabelSelector", "V1ObjectReference", "V1OwnerReference", "V1SecretKeySelector", "V1ConfigMapKeySelector",
    "V1ObjectFieldSelector", "V1ResourceFieldSelector", "V1LocalObjectReference", "V1NodeSelector",
}  # fmt: skip
# In these a number is equal to its text.
QUANTITIES: Final = {"limits", "requests", "capacity", "hard", "used", "sizeLimit", "divisor", "overhead"}
SCALARS: Final = {
    "str": "string", "bytes": "string", "datetime": "string", "date": "string",
    "int": "integer", "float": "number", "bool": "boolean",
}  # fmt: skip
TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
}  # fmt: skip


def _of_type(name: str, json_name: str, seen: frozenset[str]) -> Schema:
    if name in SCALARS:
        return {} if json_name in QUANTITIES else {"type": SCALARS[name]}
    if found := re.fullmatch(r"[lL]ist\[(.*)\]", name):
        return {"type": "array", "items": _of_type(found[1], json_name, seen)}
    if found := re.fullmatch(r"[dD]ict[(\[]str, (.*)[)\]]", name):
        return {"type": "object", "additionalProperties": _of_type(found[1], json_name, seen)}
    return {} if name in seen or not hasattr(models, name) else of_model(name, seen)


@functools.cache
def of_model(name: str, seen: frozenset[str] = frozenset()) -> Schema:
    """Return the schema of a client class such as `V1Pod`."""
    model = getattr(models, name)
    seen |= {name}
    properties = {}
    for python_name, kind in model.openapi_types.items():
        json_name = model.attribute_map[python_name]
        inner = _of_type(kind, json_name, seen)
        if keys := MAP_LISTS.get((name, json_name)):
            inner |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
        elif (name, json_name) in SET_LISTS:
            inner |= {"x-kubernetes-list-type": "set"}
        properties[json_name] = inner
    found: Schema = {"type": "object", "properties": properties}
    if name == "V1ContainerPort":
        found["properties"]["protocol"] |= {"default": "TCP"}
    return found | ({"x-kubernetes-map-type": "atomic"} if name in ATOMIC_MAPS else {})


def with_metadata(schema: Schema) -> Schema:
    """Return a custom resource's schema with the fields of every object."""
    common = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": of_model("V1ObjectMeta")}
    return schema | {"properties": schema.get("properties", {}) | common}


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _contents(schema: Schema, value: Any, path: str) -> Iterator[tuple[Any, str, Schema | None, Any]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield name, _inside(path, name), of_field(schema, name), value[name]
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield index, f"{path}[{index}]", schema.get("items", {}), each


def unknown(schema: Schema, value: Any, path: str = "") -> list[str]:
    """Return the fields that the schema lacks."""
    found = []
    for _, at, inner, each in _contents(schema, value, path):
        found += [at] if inner is None else unknown(inner, each, at)
    return found


def defaulted(schema: Schema, value: Any) -> Any:
    """Return the value with the schema's defaults for missing fields."""
    if isinstance(value, dict):
        found = {name: defaulted(of_field(schema, name) or {}, each) for name, each in value.items()}
        for name, inner in schema.get("properties", {}).items():
            if "default" in inner and found.get(name) is None:
                found[name] = inner["default"]
        return found
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), each) for each in value]
    return value


def shown(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def typed(kind: str | None, value: Any) -> bool:
    if kind is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])


def faults(schema: Schema, value: Any, path: str = "") -> list[Cause]:
    """Return what the schema refuses."""
    if schema.get("x-kubernetes-int-or-string"):
        ok = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if ok else [_mistyped(path, "integer,string", value)]
    kind = schema.get("type")
    if value is None and (schema.get("nullable") or not path):
        return []
    if not typed(kind, value):
        return [_mistyped(path, str(kind), value)]
    found = list(_bounds(schema, value, path))
    if isinstance(value, dict):
        missing = [name for name in schema.get("required", []) if name not in value]
        found += [Cause(_inside(path, name), "FieldValueRequired", "Required value") for name in missing]
    if isinstance(value, list) and schema.get("x-kubernetes-list-type") in ("map", "set"):
        found += _duplicates(schema, value, path)
    for _, at, inner, each in _contents(schema, value, path):
        found += faults(inner or {}, each, at)
    return found


def _mistyped(path: str, kind: str, value: Any) -> Cause:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", float: "number"}
    got = "null" if value is None else names.get(type(value), "integer")
    text = f'Invalid value: "{got}": {path} in body must be of type {kind}: "{got}"'
    return Cause(path, "FieldValueTypeInvalid", text)


def _bounds(schema: Schema, value: Any, path: str) -> Iterator[Cause]:
    said = f"{path} in body should"
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(shown(each) for each in schema["enum"])
        text = f"Unsupported value: {shown(value)}: supported values: {choices}"
        yield Cause(path, "FieldValueNotSupported", text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield Cause.value(path, shown(value), f"{said} be greater than or equal to {schema['minimum']}")
        if value > schema.get("maximum", value):
            yield Cause.value(path, shown(value), f"{said} be less than or equal to {schema['maximum']}")
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield Cause.value(path, shown(value), f"{said} match '{schema['pattern']}'")
        if len(value) > schema.get("maxLength", len(value)):
            limit = schema["maxLength"]
            yield Cause(path, "FieldValueTooLong", f"Too long: may not be more than {limit} bytes")
        if len(value) < schema.get("minLength", 0):
            yield Cause.value(path, shown(value), f"{said} be at least {schema['minLength']} chars long")
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            text = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
            yield Cause(path, "FieldValueTooMany", text)
        if len(value) < schema.get("minItems", 0):
            yield Cause.value(path, str(len(value)), f"{said} have at least {schema['minItems']} items")


def _duplicates(schema: Schema, value: list[Any], path: str) -> Iterator[Cause]:
    seen: set[str] = set()
    for index, each in enumerate(value):
        keys = schema.get("x-kubernetes-list-map-keys")
        name = shown({key: each[key] for key in keys if key in each} if keys else each)
        if name in seen:
            yield Cause(f"{path}[{index}]", "FieldValueDuplicate", f"Duplicate value: {name}")
        seen.add(name)
