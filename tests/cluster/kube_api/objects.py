"""The requirements for a stored object: decoding, metadata, and a few rules of built-in kinds."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.status_answers import Cause, Json, invalid, refused, unreadable
from tests.cluster.kube_api.structural_schemas import faults, shown, typed, unknown

SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
SUBDOMAIN_RULE: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{SUBDOMAIN}')"
)
LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_RULE: Final = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    f"an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{LABEL}')"
)
VALUE: Final = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
VALUE_RULE: Final = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'{VALUE}')"
)
QUALIFIED: Final = re.compile(rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
MICRO_TIMES: Final = {
    ("leases", "spec.acquireTime"), ("leases", "spec.renewTime"), ("events", "eventTime"),
    ("events", "series.lastObservedTime"),
}  # fmt: skip
MICRO: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{6})?(.*)")
ZONE: Final = re.compile(r"Z|[+-]\d\d:\d\d")
GO: Final = {"string": "string", "integer": "int32", "boolean": "bool", "number": "float64"}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request besides its object."""

    manager: str = ""
    force: bool = False
    user: str = "admin"


PLAIN: Final = Options()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reach(obj: Json, path: str) -> Any:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def decoded(kind: Kind, body: Json) -> Json:
    """Return the object as its kind defines it. Raises Refused (400), always for unknown fields."""
    if body.get("apiVersion", kind.api_version) != kind.api_version:
        text = (
            f"the API version in the data ({body['apiVersion']}) does not match the expected API version "
            f"({kind.api_version})"
        )
        raise refused(400, text)
    if body.get("kind", kind.kind) != kind.kind:
        text = f"the kind in the data ({body['kind']}) does not match the expected kind ({kind.kind})"
        raise refused(400, text)
    if not kind.custom:
        _decode(kind, body)
    if extra := unknown(kind.schema, body):
        listed = ", ".join(f'unknown field "{each}"' for each in extra)
        raise unreadable(kind.kind, kind.version, f"strict decoding error: {listed}")
    found = {"kind": kind.kind, "apiVersion": kind.api_version, **body}
    found["metadata"] = tidy(found.get("metadata") or {})
    return found if kind.custom else _without_nulls(found)


def tidy(metadata: Json) -> Json:
    """Drop empty maps and lists from metadata."""
    return {key: value for key, value in metadata.items() if value not in (None, {}, [])}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _decode(kind: Kind, body: Json) -> None:
    """Check types and times, as Go does when it reads JSON into a struct."""
    for plural, path in MICRO_TIMES:
        value = reach(body, path)
        if plural == kind.plural and isinstance(value, str) and (why := _no_micro_time(value)):
            raise unreadable(kind.kind, kind.version, why)
    wrong = _first_mistyped(kind.schema, body, kind.kind, "")
    if wrong:
        raise unreadable(kind.kind, kind.version, f"json: cannot unmarshal {wrong}")


def _first_mistyped(schema: Json, value: Any, struct: str, path: str) -> str:
    kind = schema.get("type")
    if value is None or kind is None:
        return ""
    if not typed(kind, value):
        got = {str: "string", bool: "bool", dict: "object", list: "array"}.get(type(value), "number")
        return f"{got} into Go struct field {struct}.{path} of type {GO.get(kind, struct)}"
    if isinstance(value, dict):
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {}
            under = struct if not path else f"{struct}{path[:1].upper()}{path[1:]}" if "." not in path else struct
            if found := _first_mistyped(inner, each, under, f"{path}.{name}" if path else name):
                return found
    if isinstance(value, list):
        for each in value:
            if found := _first_mistyped(schema.get("items", {}), each, struct, path):
                return found
    return ""


def _no_micro_time(text: str) -> str:
    layout = "2006-01-02T15:04:05.000000Z07:00"
    found = MICRO.fullmatch(text)
    if found is None:
        return f'parsing time "{text}" as "{layout}": cannot parse "{text}" as "2006"'
    if not found[2]:
        return f'parsing time "{text}" as "{layout}": cannot parse "{found[3]}" as ".000000"'
    if not ZONE.fullmatch(found[3]):
        return f'parsing time "{text}" as "{layout}": cannot parse "{found[3]}" as "Z07:00"'
    return ""


def meta_faults(kind: Kind, obj: Json) -> list[Cause]:
    """Return the faults of the metadata (apimachinery api/validation/objectmeta.go)."""
    metadata = obj["metadata"]
    found: list[Cause] = []
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    for where, names in (("labels", labels), ("annotations", annotations)):
        wrong = [name for name in names if not QUALIFIED.fullmatch(name.lower() if where == "annotations" else name)]
        why = "name part must consist of alphanumeric characters"
        found += [Cause.value(f"metadata.{where}", shown(name), why) for name in wrong]
    for value in labels.values():
        if len(value) > 63:
            found.append(Cause.value("metadata.labels", shown(value), "must be no more than 63 characters"))
        if not re.fullmatch(VALUE, value):
            found.append(Cause.value("metadata.labels", shown(value), VALUE_RULE))
    return found + _owner_faults(metadata.get("ownerReferences") or [])


def _owner_faults(owners: list[Json]) -> list[Cause]:
    return [
        Cause.value(f"metadata.ownerReferences[{index}].{name}", '""', f"{name} must not be empty")
        for index, each in enumerate(owners)
        for name in ("apiVersion", "kind", "name", "uid")
        if not each.get(name)
    ]


def name_faults(kind: Kind, obj: Json) -> list[Cause]:
    name = obj["metadata"].get("name", "")
    if not name:
        return [Cause("metadata.name", "FieldValueRequired", "Required value: name or generateName is required")]
    label = kind.plural in ("namespaces", "services") and not kind.group
    rule, why, most = (LABEL, LABEL_RULE, 63) if label else (SUBDOMAIN, SUBDOMAIN_RULE, 253)
    if len(name) > most:
        return [Cause.value("metadata.name", shown(name), f"must be no more than {most} characters")]
    return [] if re.fullmatch(rule, name) else [Cause.value("metadata.name", shown(name), why)]


def kind_faults(kind: Kind, obj: Json) -> list[Cause]:
    """Return the schema's faults of a custom resource, or the recorded rules of a built-in kind."""
    if kind.custom:
        return faults(kind.schema, {key: value for key, value in obj.items() if key != "metadata"})
    match kind.plural:
        case "leases":
            return _lease_faults(obj.get("spec") or {})
        case "events":
            return _event_faults(obj)
    return []


def _lease_faults(spec: Json) -> list[Cause]:
    found = []
    if (lasts := spec.get("leaseDurationSeconds")) is not None and lasts <= 0:
        found.append(Cause.value("spec.leaseDurationSeconds", str(lasts), "must be greater than 0"))
    if (moved := spec.get("leaseTransitions")) is not None and moved < 0:
        found.append(Cause.value("spec.leaseTransitions", str(moved), "must be greater than or equal to 0"))
    return found


def _event_faults(obj: Json) -> list[Cause]:
    """Check that an event is in its object's namespace. One with a time in microseconds must name reporter and
    action.
    """
    found = []
    theirs = (obj.get("involvedObject") or {}).get("namespace", "")
    ours = obj["metadata"].get("namespace", "")
    if theirs != ours and not (not theirs and ours == "default"):
        found.append(Cause.value("involvedObject.namespace", shown(theirs), "does not match event.namespace"))
    if obj.get("eventTime"):
        needed = (("reportingController", "reportingComponent"), ("reportingInstance",), ("action",), ("reason",))
        missing = [names[0] for names in needed if not any(obj.get(name) for name in names)]
        found += [Cause(name, "FieldValueRequired", "Required value") for name in missing]
        if len(obj.get("message", "").encode()) > 1024:
            found.append(Cause.value("message", '""', "can have at most 1024 bytes"))
    return found


def accept(kind: Kind, obj: Json, *, old: Json | None) -> None:
    """Check that an object can be stored. Raises Refused (422)."""
    found = [] if old else name_faults(kind, obj)
    if old is not None and old["metadata"].get("deletionTimestamp"):
        had = old["metadata"].get("finalizers") or []
        if new := [each for each in obj["metadata"].get("finalizers") or [] if each not in had]:
            listed = ", ".join(shown(each) for each in new)
            rule = "no new finalizers can be added if the object is being deleted"
            why = f"{rule}, found new finalizers []string{{{listed}}}"
            # As recorded: the check runs twice.
            found += [Cause("metadata.finalizers", "FieldValueForbidden", f"Forbidden: {why}")] * 2
    found += meta_faults(kind, obj) + kind_faults(kind, obj)
    if found:
        raise invalid(kind.named(obj["metadata"].get("name", "")), found)
