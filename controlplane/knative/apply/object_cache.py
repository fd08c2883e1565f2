"""Caches of a kind's observed objects: whole objects (`ObjectCache`), or only uids with a call per change (`follow`).

An `ObjectCache` never replaces an object's state by an older one.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

from controlplane.knative.apply.cluster import Change, ClusterApi, Deleted, Json, Ref, Synced, Upsert
from controlplane.knative.policy.object_labels import NamespacedName
from kelvin.contracts.numbers import parse_whole_number
from kelvin.process.loops import contain_errors


class ObjectCache:
    """Observed objects by name. Empty and not `synced` until the first `Synced`."""

    def __init__(self) -> None:
        self.synced = False
        self.objects: dict[Ref, Json] = {}
        # By object with a call in flight: the version at which it was last known to be deleted.
        self._deleted_versions: dict[Ref, str] = {}

    def apply_change(self, change: Change) -> set[Ref]:
        """Apply a change. Return the names whose objects may have changed."""
        match change:
            case Synced(objects, version):
                before, self.synced = self.objects, True
                self.objects = {Ref.of(each): each for each in objects}
                for ref in self._deleted_versions.keys() - self.objects.keys():
                    self._deleted_versions[ref] = version
                return set(before) | set(self.objects)
            case Upsert(obj):
                return {Ref.of(obj)} if self._accept(obj) else set()
            case Deleted(ref, uid, version):
                if ref in self._deleted_versions:
                    self._deleted_versions[ref] = version
                cached = self.objects.get(ref)
                if cached is None or (uid and cached["metadata"].get("uid") != uid):
                    return set()  # the name belongs to another object by now
                del self.objects[ref]
                return {ref}

    @contextmanager
    def track_call(self, ref: Ref) -> Iterator[Callable[[Json], bool]]:
        """Open a block around a call whose response is the object. Yield a function that stores the response, and
        returns False if a newer state is known.

        Inside the block the cache remembers at which version the object was deleted. So a response that the deletion
        has overtaken is not stored.
        """
        self._deleted_versions[ref] = ""
        try:
            yield self._accept
        finally:
            del self._deleted_versions[ref]

    def _accept(self, obj: Json) -> bool:
        """Store the object unless a newer state or deletion is known. Return whether it was stored."""
        ref = Ref.of(obj)
        cached = self.objects.get(ref)
        if cached is not None and _is_older(obj, _version(cached)):
            return False
        if _is_older(obj, self._deleted_versions.get(ref, "")):
            return False
        self.objects[ref] = obj
        return True

    def mark_deleting(self, ref: Ref, uid: str) -> None:
        """Mark an object as being deleted, before the watch says so. The deletion may take time."""
        cached = self.objects.get(ref)
        if cached is not None and cached["metadata"].get("uid") == uid:
            self.objects[ref] = {**cached, "metadata": {**cached["metadata"], "deletionTimestamp": "just now"}}


class UidTracker:
    """A cache that keeps only uids, for kinds with too many objects to keep."""

    def __init__(self) -> None:
        self._known: dict[Ref, str] = {}

    def apply_change(self, change: Change) -> Iterator[tuple[Ref, Json | None]]:
        """Apply a change. Yield each name that may have changed, with its object; None if it is gone."""
        match change:
            case Synced(objects):
                before, self._known = self._known, {Ref.of(each): _uid(each) for each in objects}
                yield from ((ref, None) for ref in before.keys() - self._known.keys())
                yield from ((Ref.of(each), each) for each in objects)
            case Upsert(obj):
                self._known[Ref.of(obj)] = _uid(obj)
                yield Ref.of(obj), obj
            case Deleted(ref, uid):
                if not uid or self._known.get(ref, uid) == uid:  # otherwise the name belongs to another object by now
                    self._known.pop(ref, None)
                    yield ref, None


async def follow(
    api: ClusterApi,
    api_version: str,
    kind: str,
    labels: str,
    on_object: Callable[[NamespacedName, Json | None], None],
    listed: asyncio.Event,
    tracker: UidTracker | None = None,
) -> None:
    """Call `on_object` for each change of an object; None means that it is gone. Runs until cancelled.

    Keeps no objects. `tracker` has the uids of an earlier run. Sets `listed` once all existing objects were processed.
    If `on_object` raises, the error is recorded and the object skipped: anyone may write such objects, and a broken one
    must not hide the others.
    """
    tracker = tracker or UidTracker()
    async with aclosing(api.watch(api_version, kind, labels=labels)) as changes:
        async for change in changes:
            for ref, obj in tracker.apply_change(change):
                with contain_errors(ref):
                    on_object(ref.namespaced_name, obj)
            listed.set()


def _uid(obj: Json) -> str:
    return str(obj["metadata"].get("uid", ""))


def _version(obj: Json) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _is_older(obj: Json, version: str) -> bool:
    """Return whether the object's version is older. Versions of one kind compare as numbers, officially since
    Kubernetes 1.35. A recreated object has a newer version than its predecessor.
    """
    own_number, other_number = parse_whole_number(_version(obj), 40), parse_whole_number(version, 40)
    return own_number is not None and other_number is not None and own_number < other_number
