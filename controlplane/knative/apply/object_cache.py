"""What was last seen of a kind of object: whole objects (`ObjectCache`), or one call for each change (`follow`).

A `ObjectCache` takes no older state of an object for a newer one.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

from controlplane.knative.apply.cluster import Change, ClusterApi, Deleted, Json, Ref, Synced, Upsert
from controlplane.knative.policy.object_labels import NamespacedName
from kelvin.contracts.numbers import parse_whole_number
from kelvin.process.loops import isolated


class ObjectCache:
    """By name. Empty and unsynced until the first `Synced`."""

    def __init__(self) -> None:
        self.synced = False
        self.objects: dict[Ref, Json] = {}
        self._deleted_versions: dict[
            Ref, str
        ] = {}  # of what is being asked for: up to which version it is known to be gone

    def take(self, change: Change) -> set[Ref]:
        """Take it in; gives the names that it may have changed."""
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
                held = self.objects.get(ref)
                if held is None or (uid and held["metadata"].get("uid") != uid):
                    return set()  # another one bears its name by now
                del self.objects[ref]
                return {ref}

    @contextmanager
    def expecting_response(self, ref: Ref) -> Iterator[Callable[[Json], bool]]:
        """Open a block around a call whose answer is the object. Yield a function that takes the answer in, and returns
        False if a newer state is known.

        Inside the block the view also remembers at which version the object was gone. So an answer is not taken
        in if the object's deletion has overtaken it.
        """
        self._deleted_versions[ref] = ""
        try:
            yield self._accept
        finally:
            del self._deleted_versions[ref]

    def _accept(self, obj: Json) -> bool:
        """An object as somebody says that it is now."""
        ref = Ref.of(obj)
        held = self.objects.get(ref)
        if held is not None and _is_older(obj, _version(held)):
            return False
        if _is_older(obj, self._deleted_versions.get(ref, "")):
            return False
        self.objects[ref] = obj
        return True

    def mark_deleting(self, ref: Ref, uid: str) -> None:
        """It was just asked to go, and may take its time."""
        held = self.objects.get(ref)
        if held is not None and held["metadata"].get("uid") == uid:
            self.objects[ref] = {**held, "metadata": {**held["metadata"], "deletionTimestamp": "just now"}}


class UidTracker:
    """A view that keeps only uids, for kinds of which there are too many objects to keep."""

    def __init__(self) -> None:
        self._known: dict[Ref, str] = {}

    def take(self, change: Change) -> Iterator[tuple[Ref, Json | None]]:
        """Take it in; gives what is now under the names that it may have changed: None where nothing is."""
        match change:
            case Synced(objects):
                before, self._known = self._known, {Ref.of(each): _uid(each) for each in objects}
                yield from ((ref, None) for ref in before.keys() - self._known.keys())
                yield from ((Ref.of(each), each) for each in objects)
            case Upsert(obj):
                self._known[Ref.of(obj)] = _uid(obj)
                yield Ref.of(obj), obj
            case Deleted(ref, uid):
                if not uid or self._known.get(ref, uid) == uid:  # else another one bears its name by now
                    self._known.pop(ref, None)
                    yield ref, None


async def follow(
    api: ClusterApi,
    api_version: str,
    kind: str,
    labels: str,
    take: Callable[[NamespacedName, Json | None], None],
    first: asyncio.Event,
    known: UidTracker | None = None,
) -> None:
    """Call `take` for each change of an object; None means that it is gone. Runs until cancelled, and keeps no objects.
    `known` are those that were taken before.

    Set `first` once all objects were taken. An object for which `take` raises is skipped, and the error recorded.
    Anybody may write such objects, and one of them must not hide the others.
    """
    known = known or UidTracker()
    async with aclosing(api.watch(api_version, kind, labels=labels)) as changes:
        async for change in changes:
            for ref, obj in known.take(change):
                with isolated(ref):
                    take(ref.place, obj)
            first.set()


def _uid(obj: Json) -> str:
    return str(obj["metadata"].get("uid", ""))


def _version(obj: Json) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _is_older(obj: Json, other: str) -> bool:
    """Versions of one kind are compared as numbers since Kubernetes 1.35, and were numbers before. An object made anew
    has a newer one than the one before it.
    """
    one, two = parse_whole_number(_version(obj), 40), parse_whole_number(other, 40)
    return one is not None and two is not None and one < two
