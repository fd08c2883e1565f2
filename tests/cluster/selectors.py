"""Label and field selectors (apimachinery labels/selector.go): which objects a list or a watch is about."""

import re
from collections.abc import Callable
from typing import Any, Final

from tests.cluster.answers import Json, refused

Test = Callable[[Json], bool]

WORD: Final = re.compile(r"\s*(!=|==|=|!|\(|\)|,|<|>|[^\s!=(),<>]+)")
EVERYWHERE: Final = ("metadata.name", "metadata.namespace")
MORE: Final[dict[str, tuple[str, ...]]] = {
    "pods": (
        "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
        "status.phase", "status.podIP", "status.nominatedNodeName",
    ),
    "events": (
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
        "reportingComponent", "source", "type",
    ),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
    "services": ("spec.clusterIP", "spec.type"),
}  # fmt: skip


def _unparsed(why: str) -> Exception:
    return refused(400, f"unable to parse requirement: {why}")


class _Words:
    def __init__(self, text: str) -> None:
        self._words = WORD.findall(text)

    def peek(self) -> str:
        return self._words[0] if self._words else ""

    def take(self) -> str:
        return self._words.pop(0) if self._words else ""


def _values(words: _Words) -> set[str]:
    if (opening := words.take()) != "(":
        raise _unparsed(f"found '{opening}' expected: '('")
    found: set[str] = set()
    while True:
        value = words.take()
        if value == ")":
            return found | {""}
        found.add("" if value == "," else value)
        if value == ",":
            continue
        after = words.take()
        if after == ")":
            return found
        if after != ",":
            raise _unparsed(f"found '{after}', expected: ',' or ')'")


def _requirement(words: _Words) -> Callable[[dict[str, str]], bool]:
    absent = words.peek() == "!"
    if absent:
        words.take()
    key = words.take()
    if not key or key in "=!(),<>":
        raise _unparsed(f"found '{key}', expected: !, identifier, or 'end of string'")
    if absent:
        return lambda labels: key not in labels
    match words.peek():
        case "" | ",":
            return lambda labels: key in labels
        case "=" | "==" | "!=":
            same = words.take() != "!="
            value = words.take() if words.peek() not in ("", ",") else ""
            return lambda labels: (labels.get(key) == value) is same
        case "in" | "notin":
            inside = words.take() == "in"
            values = _values(words)
            return lambda labels: (key in labels and labels[key] in values) is inside
    raise _unparsed(f"found '{words.peek()}', expected: in, notin, =, ==, !=, gt, lt")


def by_label(text: str) -> Test:
    """Raises Refused (400) for what cannot be read."""
    words, found = _Words(text), []
    while words.peek():
        found.append(_requirement(words))
        if (after := words.take()) not in ("", ","):
            raise _unparsed(f"found '{after}', expected: ',' or 'end of string'")
    return lambda obj: all(each(obj["metadata"].get("labels") or {}) for each in found)


def _reached(obj: Json, path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def by_field(text: str, plural: str, group: str) -> Test:
    """Raises Refused (400) for a field that this kind cannot be selected by."""
    known = (*EVERYWHERE, *(MORE.get(plural, ()) if not group else ()))
    wanted = []
    for each in filter(None, text.split(",")):
        path, sign, value = re.split(r"(!=|==|=)", each, maxsplit=1) if "=" in each else (each, "", "")
        if not sign:
            raise refused(400, f"invalid selector: '{each}'; can't understand '{each}'")
        if path not in known:
            raise refused(400, f"field label not supported: {path}")
        wanted.append((path, sign != "!=", value))
    return lambda obj: all((_reached(obj, path) == value) is same for path, same, value in wanted)
