"""The bodies of requests, read as an API server reads them: its messages for what cannot be read."""

import contextlib
import json
from typing import Any, Final

import yaml

from tests.cluster.answers import Cause, Json, options, refused
from tests.cluster.deletions import Deletion
from tests.cluster.kinds import Kind

POLICIES: Final = ("Foreground", "Background", "Orphan")


def readable(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode(errors="replace")


def json_of(raw: bytes, kind: Kind) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        text = raw.decode(errors="replace")
        position = getattr(error, "pos", 0)
        where = "looking for beginning of " + ("object key string" if text[:position].strip() else "value")
        why = f"json parse error: invalid character '{text[position : position + 1]}' {where} ({text})"
        known = f"the object provided is unrecognized (must be of type {kind.kind}): couldn't get version/kind"
        raise refused(400, f"{known}; {why}") from error


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                text = f'yaml: unmarshal errors:\n  line {line}: key "{key.value}" already set in map'
                raise refused(400, f"error strict decoding YAML: error converting YAML to JSON: {text}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def applied_of(raw: bytes, query: dict[str, str]) -> Json:
    if not query.get("fieldManager"):
        why = "Required value: is required for apply patch"
        raise options("PatchOptions", Cause("fieldManager", "FieldValueRequired", why))
    text = raw.decode()
    strict = query.get("fieldValidation") == "Strict"
    with contextlib.suppress(ValueError):
        found: Json = json.loads(text, object_pairs_hook=_once if strict else dict)
        return found
    try:
        loaded: Json = yaml.load(text, _Strict if strict else yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        why = str(error.problem).partition(", but got")[0].replace("expected", "did not find expected")
        text = f"error decoding YAML: error converting YAML to JSON: yaml: line {line}: {why}"
        raise refused(400, text) from error
    return loaded


def _once(pairs: list[tuple[str, Any]]) -> Json:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(pairs)  # YAML's reader says which, and where
    return dict(pairs)


def deletion_of(query: dict[str, str], raw: bytes) -> Deletion:
    body = json.loads(raw) if raw else {}
    policy = body.get("propagationPolicy") or query.get("propagationPolicy") or ""
    if policy and policy not in POLICIES:
        listed = ", ".join(f'"{each}"' for each in (*POLICIES, "nil"))
        why = f'Unsupported value: "{policy}": supported values: {listed}'
        raise options("DeleteOptions", Cause("propagationPolicy", "FieldValueNotSupported", why))
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    conditions = body.get("preconditions") or {}
    return Deletion(
        policy,
        conditions.get("uid") or "",
        conditions.get("resourceVersion") or "",
        None if grace is None else int(grace),
        query.get("dryRun") == "All" or "All" in (body.get("dryRun") or ()),
    )
