"""Field sets of objects by schema: the fields of an object, differences, and merging.

A path is a tuple of `f:name`, `k:{"key":...}` or `v:"value"` as in `fieldsV1`; a field set is a set of paths. The rules
are those of sigs.k8s.io/structured-merge-diff v6 (typed/tofieldset.go, compare.go, merge.go, remove.go). A list is
atomic unless its schema says map or set. A map is granular unless it says atomic. Without a schema the type is deduced
from the value (lists are atomic).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

Schema = dict[str, Any]
Path = tuple[str, ...]
Fields = frozenset[Path]
ABSENT: Final[Any] = object()
DEDUCED: Final[Schema] = {"x-kubernetes-preserve-unknown-fields": True}
EMPTY: Final[Fields] = frozenset()


class UndeclaredField(Exception):
    """The object does not fit its schema. There is one line per fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def declared(schema: Schema, name: str) -> Schema | None:
    """Return the schema of a field that the schema names, else None."""
    found: Schema | None = schema.get("properties", {}).get(name)
    return found


def of_field(schema: Schema, name: str) -> Schema | None:
    """Return the schema of the value at a key, or None if the key is not allowed."""
    found = declared(schema, name)
    if found is not None:
        return found
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        return more
    loose = more or schema.get("x-kubernetes-preserve-unknown-fields") or "type" not in schema
    return DEDUCED if loose else None


def atomic(schema: Schema, value: Any) -> bool:
    """Return whether the value has one owner as a whole."""
    if isinstance(value, list):
        return bool(schema.get("x-kubernetes-list-type", "atomic") == "atomic")
    return not isinstance(value, dict) or schema.get("x-kubernetes-map-type") == "atomic"


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def element(schema: Schema, item: Any) -> str:
    """Return the path element of an item in a list of type map or set."""
    if schema["x-kubernetes-list-type"] == "set":
        return f"v:{compact(item)}"
    properties = schema.get("items", {}).get("properties", {})
    keys = schema["x-kubernetes-list-map-keys"]
    named = {key: item.get(key, properties.get(key, {}).get("default")) for key in keys}
    return f"k:{compact(named)}"


def children(schema: Schema, value: Any) -> Iterator[tuple[str, Schema, Any]]:
    """Yield the parts of a granular value."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"f:{name}", of_field(schema, name) or DEDUCED, each
    elif isinstance(value, list):
        for each in value:
            yield element(schema, each), schema.get("items", DEDUCED), each


def shown(path: Iterable[str]) -> str:
    """Return the path as messages show it: `.spec.containers[name="runtime"].image`."""
    text = ""
    for each in path:
        kind, name = each[0], each[2:]
        if kind == "f":
            text += f".{name}"
        elif kind == "k":
            text += "[" + ",".join(f"{key}={compact(value)}" for key, value in json.loads(name).items()) + "]"
        else:
            text += f"[={name}]"
    return text


def check(schema: Schema, value: Any, at: Path = ()) -> list[str]:
    """Return the faults of a value: an undeclared field (the first of a map, by name), a wrong type."""
    kind = schema.get("type")
    if kind is None or value is None:
        return []
    if isinstance(value, dict) and kind == "object":
        faults: list[str] = []
        for name in sorted(value):
            inner = of_field(schema, name)
            if inner is None:
                return [*faults, f"{shown((*at, f'f:{name}'))}: field not declared in schema"]
            faults += check(inner, value[name], (*at, f"f:{name}"))
        return faults
    if isinstance(value, list) and kind == "array":
        items = schema.get("items", DEDUCED)
        return [fault for index, each in enumerate(value) for fault in check(items, each, (*at, f"v:{index}"))]
    return [f"{shown(at)}: {wrong}"] if (wrong := mistyped(kind, value)) else []


def mistyped(kind: str, value: Any) -> str:
    got = {str: "string", bool: "boolean", dict: "map", list: "list"}.get(type(value), "")
    got = got if got and kind in ("integer", "number") else f"&value.valueUnstructured{{Value:{json.dumps(value)}}}"
    match kind:
        case "string" if not isinstance(value, str):
            return f"expected string, got {got}"
        case "integer" | "number" if isinstance(value, bool) or not isinstance(value, int | float):
            return f"expected numeric (int or float), got {got}"
        case "boolean" if not isinstance(value, bool):
            return f"expected boolean, got {got}"
        case "object" if not isinstance(value, dict):
            return f"expected map, got {got}"
        case "array" if not isinstance(value, list):
            return f"expected list, got {got}"
    return ""


def fields(schema: Schema, value: Any, at: Path = ()) -> Fields:
    """Return every field that the value sets, as an applying manager owns them."""
    if atomic(schema, value):
        return frozenset({at})
    found: set[Path] = set()
    for name, inner, each in children(schema, value):
        path = (*at, name)
        found |= fields(inner, each, path)
        if name[0] != "f" or each is None or each == {} or declared(schema, name[2:]) is None:
            found.add(path)
        if each == [] and not atomic(inner, each):
            found.discard(path)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Difference:
    """The fields that differ between two versions of an object."""

    added: Fields = EMPTY
    modified: Fields = EMPTY
    removed: Fields = EMPTY

    @property
    def none(self) -> bool:
        return not (self.added or self.modified or self.removed)


@dataclass(slots=True)
class _Walk:
    added: set[Path] = field(default_factory=set)
    modified: set[Path] = field(default_factory=set)
    removed: set[Path] = field(default_factory=set)

    def leaf(self, old: Any, new: Any, at: Path) -> None:
        if old is ABSENT:
            self.added.add(at)
        elif new is ABSENT:
            self.removed.add(at)
        elif old != new:
            self.modified.add(at)

    def walk(self, schema: Schema, old: Any, new: Any, at: Path) -> None:
        some = old if new is ABSENT or new is None else new
        other = new if some is old else old
        whole = not isinstance(some, dict | list) or (other not in (ABSENT, None) and type(other) is not type(some))
        if whole or atomic(schema, some) or not (some or (other is not ABSENT and other)):
            self.leaf(old, new, at)
            return
        left = {name: (inner, each) for name, inner, each in children(schema, {} if old is ABSENT else old)}
        right = {name: (inner, each) for name, inner, each in children(schema, {} if new is ABSENT else new)}
        for name in left.keys() | right.keys():
            inner = (left.get(name) or right[name])[0]
            self.walk(inner, left.get(name, (0, ABSENT))[1], right.get(name, (0, ABSENT))[1], (*at, name))
        if at and (old is ABSENT or new is ABSENT):
            (self.added if old is ABSENT else self.removed).add(at)


def difference(schema: Schema, old: Any, new: Any) -> Difference:
    walk = _Walk()
    walk.walk(schema, old, new, ())
    return Difference(frozenset(walk.added), frozenset(walk.modified), frozenset(walk.removed))


def merge(schema: Schema, live: Any, config: Any) -> Any:
    """Return the applied configuration merged into the live value."""
    if atomic(schema, config) or type(live) is not type(config):
        return config
    if isinstance(config, dict):
        laid = dict(live)
        for name, each in config.items():
            inner = of_field(schema, name) or DEDUCED
            laid[name] = merge(inner, live[name], each) if name in live else each
        return laid
    found = {element(schema, each): each for each in live}
    items = schema.get("items", DEDUCED)
    for each in config:
        name = element(schema, each)
        found[name] = merge(items, found[name], each) if name in found else each
    return list(found.values())


def without(schema: Schema, value: Any, gone: Fields, at: Path = ()) -> Any:
    """Return the value without these fields. A map that loses all its fields becomes null."""
    if atomic(schema, value):
        return value
    kept = [
        (name[2:], without(inner, each, gone, (*at, name)))
        for name, inner, each in children(schema, value)
        if (*at, name) not in gone
    ]
    if isinstance(value, dict):
        return dict(kept) if kept or not value else None
    return [left for _, left in kept]


def with_parents(schema: Schema, found: Fields) -> Fields:
    """Return the fields with every parent that is a field of a struct."""
    grown = set(found)
    for path in found:
        inner: Schema = schema
        for depth, name in enumerate(path):
            if name[0] == "f":
                if declared(inner, name[2:]) is not None:
                    grown.add(path[: depth + 1])
                inner = of_field(inner, name[2:]) or DEDUCED
            else:
                inner = inner.get("items", DEDUCED)
    return frozenset(grown)


def in_order(found: Fields) -> list[Path]:
    """Return the paths in walking order: the members of a level by name, then the levels below."""

    def walk(paths: list[Path], depth: int) -> Iterator[Path]:
        yield from sorted(path for path in paths if len(path) == depth + 1)
        below: dict[str, list[Path]] = {}
        for path in paths:
            if len(path) > depth + 1:
                below.setdefault(path[depth], []).append(path)
        for name in sorted(below):
            yield from walk(below[name], depth + 1)

    return list(walk([path for path in found if path], 0))


def to_v1(found: Fields) -> dict[str, Any]:
    """Return the fields in the `fieldsV1` format."""
    root: dict[str, Any] = {}
    parents = {path[:depth] for path in found for depth in range(1, len(path))}
    for path in found:
        here = root
        for name in path:
            here = here.setdefault(name, {})
        if path in parents:
            here["."] = {}
    return root


def from_v1(root: dict[str, Any], at: Path = ()) -> Fields:
    found: set[Path] = set()
    for name, inner in root.items():
        if name == ".":
            found.add(at)
        elif inner:
            found |= from_v1(inner, (*at, name))
        else:
            found.add((*at, name))
    return frozenset(found)
