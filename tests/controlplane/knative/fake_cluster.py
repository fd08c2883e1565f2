"""A cluster in memory. It records calls, refuses them if a test says so, and feeds watches.

It tracks field owners as server-side apply does, counts generations, honours finalizers, deletes owned objects with
their owner, and sets the defaults of Knative's webhook.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import Any, Protocol

from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import (
    ApiFailure,
    Change,
    ClusterError,
    Deleted,
    Json,
    Missing,
    Ref,
    Synced,
    Unreachable,
    Upsert,
    WriteConflict,
)
from tests.controlplane.virtual_time import VirtualClock

SERVICE = ("serving.knative.dev/v1", "Service")
M = Ref(*SERVICE, "models", "m")
HERE, THERE = "kelvin", "kelvin-staging"  # installations
DELETION_TIME = "2026-01-01T00:00:00Z"


class RunnableLoop(Protocol):
    """A reconciler loop over a cluster."""

    def run(self) -> Coroutine[Any, Any, None]: ...


@asynccontextmanager
async def running_loop(loop: RunnableLoop) -> AsyncIterator[None]:
    """Run the loop until the block ends."""
    task = asyncio.create_task(loop.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def service(name: str, *, image: str = "one", scale: str | None = "3", labels: bool = True) -> Json:
    """Return a Service as the product would write it."""
    return {
        "apiVersion": SERVICE[0],
        "kind": SERVICE[1],
        "metadata": {
            "name": name,
            "namespace": "models",
            "labels": {"app.kubernetes.io/managed-by": "kelvin"} if labels else {},
        },
        "spec": {
            "template": {
                "metadata": {"annotations": {} if scale is None else {"autoscaling.knative.dev/max-scale": scale}},
                "spec": {
                    "containers": [{"name": "runtime", "image": image, "resources": {"limits": {"memory": "1Ki"}}}]
                },
            }
        },
    }


def differing_paths(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return the paths of fields in `wanted` that differ in `found`. `found` may have more fields."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [each for key in wanted for each in differing_paths(wanted[key], found.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [each for pair in zip(wanted, found, strict=True) for each in differing_paths(*pair, f"{path}[]")]
    return [] if wanted == found else [path]


class FakeCluster:
    """Implements `ClusterApi`. `refuse` maps an object to the failures of its next calls, one after another."""

    def __init__(self) -> None:
        self.objects: dict[Ref, Json] = {}
        self.calls: list[tuple[str, Ref]] = []
        self.writes: list[Ref] = []  # calls of `apply` that changed an object
        self.events: list[tuple[Ref, str, str, bool]] = []
        self.refuse: dict[Ref, deque[ApiFailure | None]] = {}
        self.away = False  # every call fails as unreachable
        self.forced_container_fields: dict[Ref, Json] = {}  # container fields of that Service that override every write
        self.is_deletion_slow = False  # deleted objects stay until a test removes them
        self.watches_deliver = asyncio.Event()  # watches deliver nothing while it is not set
        self.watches_deliver.set()
        self.answered = asyncio.Event()  # calls take effect and do not return while it is not set
        self.answered.set()
        # The number of the call that never returns, and whether it takes effect.
        self.unanswered_call: tuple[int, bool] | None = None
        self.hung = asyncio.Event()
        self.open_watches: list[tuple[tuple[str, str, str], asyncio.Queue[Change]]] = []
        self._applied: dict[Ref, Json] = {}
        self._version = 100
        self._uid = 0

    # -- the interface that the product uses

    async def apply(self, obj: Json) -> Json:
        ref = Ref.of(obj)
        written: Json = await self._call("apply", ref, lambda: self._write(ref, obj))
        return written

    async def apply_status(self, obj: Json) -> Json:
        ref = Ref.of(obj)
        written: Json = await self._call("status", ref, lambda: self._write_status(ref, obj["status"]))
        return written

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        await self._call("delete", ref, lambda: self._delete(ref, uid))

    async def exists(self, ref: Ref) -> bool:
        found: bool = await self._call("exists", ref, lambda: ref in self.objects)
        return found

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((Ref.of(about), reason, message, warning))

    async def watch(self, api_version: str, kind: str, *, labels: str = "") -> AsyncGenerator[Change, None]:
        mine: asyncio.Queue[Change] = asyncio.Queue()
        place = ((api_version, kind, labels), mine)
        self.open_watches.append(place)
        try:
            await self.watches_deliver.wait()
            yield self._all(place[0])
            while True:
                change = await mine.get()
                await self.watches_deliver.wait()
                yield change
        finally:
            self.open_watches.remove(place)

    async def _call(self, name: str, ref: Ref, act: Any) -> Any:
        if self.away:
            raise ClusterError(Unreachable("away"))
        self.calls.append((name, ref))
        hangs, done = self.unanswered_call if self.unanswered_call is not None else (0, False)
        if hangs == len(self.calls) and not done:
            await self._hang()
        await asyncio.sleep(0)
        troubles = self.refuse.get(ref)
        trouble = troubles.popleft() if troubles else None
        if trouble is not None:
            raise ClusterError(trouble)
        answer = act()
        if hangs == len(self.calls):
            await self._hang()
        await asyncio.sleep(0)
        await self.answered.wait()
        return answer

    async def _hang(self) -> None:
        self.hung.set()
        await asyncio.Event().wait()

    def _write(self, ref: Ref, obj: Json) -> Json:
        held, uid = deepcopy(self.objects.get(ref)), obj["metadata"].get("uid")
        if uid is not None and (held is None or held["metadata"].get("uid") != uid):
            raise ClusterError(WriteConflict("another object, or none"))
        held = held or self._new(ref)
        before = deepcopy(held.get("spec"))
        _remove(held, self._applied.get(ref, {}), obj)
        _merge(held, deepcopy(obj))
        if ref.kind == "Service":
            for container in held["spec"]["template"]["spec"]["containers"]:
                container["readinessProbe"] = {"successThreshold": 1}
                container.update(self.forced_container_fields.get(ref, {}))
            held["spec"]["traffic"] = [{"latestRevision": True, "percent": 100}]
            owned = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}
            held["metadata"]["managedFields"] = [
                {"manager": "kelvin", "operation": "Apply", "fieldsV1": _fields(owned)},
            ]
        if held.get("spec") != before:
            held["metadata"]["generation"] = held["metadata"].get("generation", 0) + 1
        self._applied[ref] = deepcopy(obj)
        before_it = self._version
        answer = self.put(held)
        if self._version != before_it:
            self.writes.append(ref)
        self._remove_if_released(ref)
        return answer

    def _write_status(self, ref: Ref, status: Json) -> Json:
        if ref not in self.objects:
            raise ClusterError(Missing("no such object"))
        return self.put({**deepcopy(self.objects[ref]), "status": deepcopy(status)})

    def _new(self, ref: Ref) -> Json:
        self._uid += 1
        head = {"name": ref.name, "uid": f"uid-{self._uid}"}
        head |= {} if ref.namespace is None else {"namespace": ref.namespace}
        return {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": head}

    def _delete(self, ref: Ref, uid: str | None) -> None:
        held = self.objects.get(ref)
        if held is None:
            return
        if uid is not None and held["metadata"]["uid"] != uid:
            raise ClusterError(WriteConflict("another uid"))
        if self.is_deletion_slow:
            self.request_deletion(ref)
        else:
            self.remove(ref)

    # -- other clients

    def put(self, obj: Json) -> Json:
        """Store an object as any other client. Watches see it if it changed."""
        ref = Ref.of(obj)
        before = self.objects.get(ref)
        if before is None:
            obj["metadata"].setdefault("uid", f"uid-{self._uid}")
        else:
            obj["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if obj != before:
            self._version += 1
            obj["metadata"]["resourceVersion"] = str(self._version)
            self.objects[ref] = obj
            self._tell(ref, obj, before)
        return deepcopy(obj)

    def edit(self, ref: Ref, path: tuple[str | int, ...], value: Any) -> None:
        """Write a field as another manager, which owns the field from then on."""
        obj: Any = deepcopy(self.objects[ref])
        place: Any = obj
        for step in path[:-1]:
            place = place[step]
        if path[0] == "spec" and place.get(path[-1]) != value:
            obj["metadata"]["generation"] += 1
        place[path[-1]] = value
        _disown(obj["metadata"]["managedFields"][0]["fieldsV1"], path)
        self.put(obj)

    def declare(self, kind: str, name: str, namespace: str | None = None, **spec: Any) -> Ref:
        """Write one of our own kinds, as `kubectl apply` does."""
        ref = Ref("kelvin.dev/v1alpha1", kind, namespace, name)
        held = deepcopy(self.objects.get(ref)) or self._new(ref)
        if held.get("spec") != spec:
            held["metadata"]["generation"] = held["metadata"].get("generation", 0) + 1
        self.put({**held, "spec": spec})
        return ref

    def request_deletion(self, ref: Ref) -> None:
        """Delete as `kubectl` does: with a finalizer, or while `is_deletion_slow`, the object stays for now."""
        held = deepcopy(self.objects[ref])
        held["metadata"]["deletionTimestamp"] = DELETION_TIME
        self.put(held)
        self._remove_if_released(ref)

    def _remove_if_released(self, ref: Ref) -> None:
        about = self.objects[ref]["metadata"]
        if "deletionTimestamp" in about and not about.get("finalizers") and not self.is_deletion_slow:
            self.remove(ref)

    def remove(self, ref: Ref) -> None:
        """Remove an object, and what it owns."""
        gone = self.objects.pop(ref)
        self._applied.pop(ref, None)
        self._version += 1
        self._tell(ref, None, gone)
        for owned in [each for each, obj in self.objects.items() if _is_owned(obj, gone)]:
            self.remove(owned)

    def resync(self) -> None:
        """Restart all watches, as after a missed event."""
        for kind, mine in self.open_watches:
            while not mine.empty():
                mine.get_nowait()
            mine.put_nowait(self._all(kind))

    # -- the present state

    def of(self, kind: str) -> list[Json]:
        """Return all objects of a kind."""
        return [obj for ref, obj in self.objects.items() if ref.kind == kind]

    def conditions(self, ref: Ref) -> dict[str, tuple[str, str]]:
        """Return (status, reason) of each condition in its status."""
        found = (self.objects[ref].get("status") or {}).get("conditions") or ()
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    def _all(self, kind: tuple[str, str, str]) -> Synced:
        shown = tuple(deepcopy(each) for each in self.objects.values() if _shown(each, kind))
        return Synced(shown, str(self._version))

    def _tell(self, ref: Ref, obj: Json | None, before: Json | None) -> None:
        for kind, mine in self.open_watches:
            if obj is not None and _shown(obj, kind):
                mine.put_nowait(Upsert(deepcopy(obj)))
            elif before is not None and _shown(before, kind):
                mine.put_nowait(Deleted(ref, before["metadata"].get("uid", ""), str(self._version)))


@asynccontextmanager
async def running_applier() -> AsyncIterator[tuple[FakeCluster, Applier, VirtualClock]]:
    """Yield a cluster in memory, an Applier that runs on it, and its clock. No watch may be left open."""
    world, clock = FakeCluster(), VirtualClock()
    applier = Applier(world, *SERVICE, clock, HERE, luck=lambda: 0.0)
    async with running_loop(applier):
        await clock.advance(0.1)
        yield world, applier, clock
    assert world.open_watches == []


def _shown(obj: Json, kind: tuple[str, str, str]) -> bool:
    if (obj["apiVersion"], obj["kind"]) != kind[:2]:
        return False
    labels = obj["metadata"].get("labels") or {}
    return not kind[2] or labels.get("app.kubernetes.io/managed-by") == "kelvin"


def _is_owned(obj: Json, owner: Json) -> bool:
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == owner["metadata"].get("uid") for each in owners)


def _merge(held: Json, obj: Json) -> None:
    for key, value in obj.items():
        if isinstance(value, dict) and isinstance(held.get(key), dict):
            _merge(held[key], value)
        else:
            held[key] = value


def _remove(held: Json, before: Json, obj: Json) -> None:
    for key, value in before.items():
        if key not in obj:
            held.pop(key, None)
        elif isinstance(value, dict) and isinstance(obj[key], dict) and isinstance(held.get(key), dict):
            _remove(held[key], value, obj[key])


def _fields(obj: Any) -> Json:
    if not isinstance(obj, dict):
        return {}
    return {f"f:{key}": _fields(value) for key, value in obj.items()}


def _disown(fields: Json, path: tuple[str | int, ...]) -> None:
    """Remove a field from the managed fields, and parents that become empty."""
    inner = fields.get(f"f:{path[0]}")
    if inner and len(path) > 1:
        _disown(inner, path[1:])
    if not inner or len(path) == 1:
        fields.pop(f"f:{path[0]}", None)
