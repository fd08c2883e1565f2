"""A watch: the events after a version that match a query, as the watch cache delivers them."""

from tests.cluster.kube_api.event_store import Entry, EventStore, ListQuery, as_version, number
from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.status_answers import Json, failure, refused


def expired(version: int, oldest: int) -> Json:
    return failure(410, f"too old resource version: {version} ({oldest})")


class Watch:
    """Not locked. Call `due` again after each change of the store."""

    def __init__(self, store: EventStore, kind: Kind, namespace: str | None, query: dict[str, str]) -> None:
        """Begin a watch. Raises Refused for an invalid query."""
        self.kind = kind
        self.bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        self._store = store
        self._asked = asked = ListQuery.read(namespace, query)
        if asked.version in ("", "0"):
            raise refused(400, "a watch without a version: not imitated")
        self._after = number(asked.version)
        events = store.events(kind)
        self._next = next((index for index, each in enumerate(events) if each.version > self._after), len(events))
        self._told: list[Json] = []
        self.over = self._after < store.oldest(kind)
        if self.over:
            self._told = [{"type": "ERROR", "object": expired(self._after, store.oldest(kind))}]

    def _event(self, type_: str, obj: Json) -> Json:
        return {"type": type_, "object": as_version(self.kind, obj)}

    def bookmark(self) -> Json:
        """Return a bookmark with the version of the kind's last event, or of the whole store before the first one."""
        events = self._store.events(self.kind)
        version = max(self._after, events[-1].version) if events else self._store.version
        metadata: Json = {"resourceVersion": str(version)}
        return {
            "type": "BOOKMARK",
            "object": {"kind": self.kind.kind, "apiVersion": self.kind.api_version, "metadata": metadata},
        }

    def due(self) -> list[Json]:
        """Return the events since the last call."""
        told, self._told = self._told, []
        if self.over:
            return told
        events = self._store.events(self.kind)
        for entry in events[self._next :]:
            if entry.version > self._after and (event := self._seen(entry)):
                told.append(event)
        self._next = len(events)
        return told

    def _seen(self, entry: Entry) -> Json | None:
        """Return the event as the selector sees it: an object that begins or ceases to match is added or deleted."""
        about = self._asked.about
        was = entry.before is not None and about(entry.before)
        is_ = entry.type != "DELETED" and about(entry.obj)
        if entry.type == "DELETED" or entry.before is None:
            return self._event(entry.type, entry.obj) if was or is_ else None
        if is_:
            return self._event("MODIFIED" if was else "ADDED", entry.obj)
        if not was:
            return None
        metadata = entry.before["metadata"] | {"resourceVersion": str(entry.version)}
        return self._event("DELETED", entry.before | {"metadata": metadata})
