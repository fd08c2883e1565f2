"""JSON merge patch (RFC 7386), JSON patch (RFC 6902), and strategic merge patch with only the `delete` directive."""

import copy
from typing import Any, Final

from tests.cluster.kube_api.field_sets import DEDUCED, Schema, atomic, element, of_field

APPENDING: Final = "-"


class Failed(Exception):
    """The patch doesn't fit the object."""


def merged(target: Any, patch: Any) -> Any:
    """Return the target with a merge patch: null removes a field, a list replaces a list."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def strategic(schema: Schema, target: Any, patch: Any) -> Any:
    """Return the target with a strategic merge patch: lists whose items have keys are merged by key."""
    if isinstance(patch, dict):
        found = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = strategic(of_field(schema, key) or DEDUCED, found.get(key), value)
        return found
    if not isinstance(patch, list) or not isinstance(target, list) or atomic(schema, patch):
        return patch
    kept = {element(schema, each): each for each in target}
    for each in patch:
        name, plain = element(schema, each), isinstance(each, dict)
        if plain and each.get("$patch") == "delete":
            kept.pop(name, None)
        else:
            kept[name] = strategic(schema["items"], kept.get(name), each)
    return list(kept.values())


def _parts(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise Failed(pointer)
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _at(value: Any, part: str) -> Any:
    try:
        return value[int(part)] if isinstance(value, list) else value[part]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise Failed(part) from error


def _reach(value: Any, parts: list[str]) -> Any:
    for part in parts:
        value = _at(value, part)
    return value


def _add(root: Any, parts: list[str], value: Any, *, replace: bool = False) -> None:
    parent = _reach(root, parts[:-1])
    if replace:
        _at(parent, parts[-1])
    if isinstance(parent, dict):
        parent[parts[-1]] = value
    elif isinstance(parent, list) and replace:
        parent[int(parts[-1])] = value
    elif isinstance(parent, list):
        index = len(parent) if parts[-1] == APPENDING else int(parts[-1])
        if index > len(parent):
            raise Failed(parts[-1])
        parent.insert(index, value)
    else:
        raise Failed(parts[-1])


def _remove(root: Any, parts: list[str]) -> Any:
    parent = _reach(root, parts[:-1])
    found = _at(parent, parts[-1])
    del parent[int(parts[-1]) if isinstance(parent, list) else parts[-1]]
    return found


def patched(target: Any, operations: list[dict[str, Any]]) -> Any:
    """Apply all operations or none. Raises Failed."""
    root = copy.deepcopy(target)
    for each in operations:
        parts = _parts(each["path"])
        match each["op"]:
            case "test":
                if _reach(root, parts) != each.get("value"):
                    raise Failed(each["path"])
            case "add" if not parts:
                root = each["value"]
            case "add" | "replace" as op:
                _add(root, parts, copy.deepcopy(each["value"]), replace=op == "replace")
            case "remove":
                _remove(root, parts)
            case "copy":
                _add(root, parts, copy.deepcopy(_reach(root, _parts(each["from"]))))
            case "move":
                _add(root, parts, _remove(root, _parts(each["from"])))
            case other:
                raise Failed(other)
    return root
