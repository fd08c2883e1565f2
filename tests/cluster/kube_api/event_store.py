"""The etcd and watch cache of the fake server: objects, one sequence of versions, and every event.

Nothing is locked here; ObjectStorage does that. Objects are never changed in place, so events may share them.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.status_answers import CONTINUE_TOO_OLD, Json, Refused, failure, refused

Key = tuple[str, str]  # namespace ("" where there is none), name
FIRST_VERSION: Final = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """One event: the object after it and before it."""

    version: int
    type: str  # "ADDED" | "MODIFIED" | "DELETED"
    obj: Json
    before: Json | None


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The query of a list or a watch."""

    namespace: str | None
    wanted: Callable[[Json], bool]
    selected: bool  # a label selector was given
    version: str = ""
    limit: int = 0
    token: str = ""

    @classmethod
    def read(cls, namespace: str | None, query: dict[str, str]) -> "ListQuery":
        """Parse a query. Raises Refused (400) for parameters that are not imitated."""
        for name in ("fieldSelector", "resourceVersionMatch", "sendInitialEvents"):
            if query.get(name):
                raise refused(400, f"{name}: not imitated")
        selector = query.get("labelSelector", "")
        version, token = query.get("resourceVersion", ""), query.get("continue", "")
        return cls(namespace, _by_label(selector), bool(selector), version, int(query.get("limit") or 0), token)

    def about(self, obj: Json) -> bool:
        here = self.namespace is None or obj["metadata"].get("namespace") == self.namespace
        return here and self.wanted(obj)


def _by_label(text: str) -> Callable[[Json], bool]:
    """Return a filter for `key=value`, `key!=value` and `key`. Raises Refused (400) for other selectors."""
    tests = [re.fullmatch(r"([\w./-]+)(?:(!?=)([\w.-]*))?", each) for each in filter(None, text.split(","))]
    if None in tests:
        raise refused(400, f"{text}: not imitated")

    def about(obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(
            (labels.get(test[1]) == test[3]) is (test[2] == "=") if test[2] else test[1] in labels
            for test in tests
            if test
        )

    return about


def number(text: str) -> int:
    """Parse a resource version. Raises Refused (500, as recorded)."""
    if text.isdigit():
        return int(text)
    why = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
    raise refused(500, why, reason=None)


def token(version: int, start: str) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start + "\0"}, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def opened(text: str) -> tuple[int, str]:
    """Return the version of a continue token, and the last key before it."""
    found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return int(found["rv"]), str(found["start"]).removesuffix("\0")


class EventStore:
    """All objects and all their events."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self._objects: dict[tuple[str, str], dict[Key, Json]] = {}
        self._events: dict[tuple[str, str], list[Entry]] = {}
        self._oldest: dict[tuple[str, str], int] = {}
        self._lists_from = FIRST_VERSION
        self.changed: list[Callable[[], None]] = []

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        found = self._objects.get(kind.stored, {}).get((namespace, name))
        return None if found is None else as_version(kind, found)

    def all_objects(self) -> Iterator[tuple[tuple[str, str], Json]]:
        for stored, objects in self._objects.items():
            for obj in list(objects.values()):
                yield stored, obj

    def upsert(self, kind: Kind, obj: Json) -> Json:
        """Store an object under the next version."""
        metadata = obj["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        self.version += 1
        found = obj | {"metadata": metadata | {"resourceVersion": str(self.version)}}
        objects = self._objects.setdefault(kind.stored, {})
        before = objects.get(key)
        objects[key] = found
        self._note(kind, Entry(self.version, "MODIFIED" if before else "ADDED", found, before))
        return found

    def remove(self, kind: Kind, obj: Json) -> None:
        """Remove an object. Its event has the last state under a new version."""
        metadata = obj["metadata"]
        before = self._objects[kind.stored].pop((metadata.get("namespace", ""), metadata["name"]))
        self.version += 1
        last = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self._note(kind, Entry(self.version, "DELETED", last, before))

    def _note(self, kind: Kind, entry: Entry) -> None:
        self._events.setdefault(kind.stored, []).append(entry)
        for notify in self.changed:
            notify()

    def events(self, kind: Kind) -> list[Entry]:
        return self._events.setdefault(kind.stored, [])

    def oldest(self, kind: Kind) -> int:
        """Return the version after which a watch can begin."""
        return self._oldest.get(kind.stored, 0)

    def expire(self, kind: Kind | None = None) -> None:
        """Compact all versions until now. Continuing from one of them gives 410."""
        for stored in list(self._events) if kind is None else [kind.stored]:
            self._oldest[stored] = self.version
        if kind is None:
            self._lists_from = self.version + 1

    def start_watch_cache(self, kind: Kind) -> None:
        """Start the watch cache of a newly defined kind."""
        self._oldest[kind.stored] = self.version

    def _at(self, kind: Kind, version: int) -> list[Json]:
        state: dict[Key, Json] = {}
        for entry in self.events(kind):
            if entry.version > version:
                break
            metadata = entry.obj["metadata"]
            key = (metadata.get("namespace", ""), metadata["name"])
            if entry.type == "DELETED":
                state.pop(key, None)
            else:
                state[key] = entry.obj
        return [state[key] for key in sorted(state)]

    def listed(self, kind: Kind, asked: ListQuery) -> Json:
        """Return a list response. Raises Refused: 410 for an expired version."""
        version, start = self.version, ""
        if asked.token:
            version, start = opened(asked.token)
            if version < self._lists_from:
                again = token(-1, start.removeprefix("/"))
                raise Refused(410, failure(410, CONTINUE_TOO_OLD) | {"metadata": {"continue": again}})
        found = [each for each in self._at(kind, version) if asked.about(each)]
        rest = [each for each in found if not start or _start(asked, each).lstrip("/") > start.lstrip("/")]
        page = rest[: asked.limit] if asked.limit else rest
        metadata: Json = {"resourceVersion": str(version)}
        if len(page) < len(rest):
            metadata["continue"] = token(version, _start(asked, page[-1]))
            if not asked.selected:
                metadata["remainingItemCount"] = len(rest) - len(page)
        items = [as_version(kind, each) for each in page]
        if kind.custom:
            metadata.setdefault("continue", "")
        else:
            items = [{key: value for key, value in each.items() if key not in ("kind", "apiVersion")} for each in items]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}


def _start(asked: ListQuery, obj: Json) -> str:
    """Return the object's key in list order, as continue tokens have it."""
    metadata = obj["metadata"]
    name = str(metadata["name"])
    return f"/{name}" if asked.namespace is not None else f"{metadata.get('namespace', '')}/{name}"


def as_version(kind: Kind, obj: Json) -> Json:
    return obj if obj["apiVersion"] == kind.api_version else obj | {"apiVersion": kind.api_version}
