"""A cluster in memory that holds declared objects: generations, statuses, finalizers, and who watches."""

import asyncio
from collections.abc import AsyncGenerator
from copy import deepcopy
from typing import Any

from controlplane.scaling.knative.cluster import (
    Change,
    ClusterError,
    Conflict,
    Gone,
    Json,
    Missing,
    Ref,
    Synced,
    Unreachable,
    Upsert,
)


class DeclaredCluster:
    """Implements `ClusterApi` as far as custom resources of ours need it. `away` refuses every call; while `answered`
    is not set, what is asked is done, and nobody hears that it was.
    """

    def __init__(self) -> None:
        self.objects: dict[Ref, Json] = {}
        self.writes: list[tuple[str, Ref]] = []
        self.events: list[tuple[Ref, str, str, bool]] = []
        self.away = False
        self.answered = asyncio.Event()
        self.answered.set()
        self.watching: list[tuple[str, asyncio.Queue[Change]]] = []
        self._uid = 0
        self._version = 100

    def declare(self, kind: str, name: str, namespace: str | None = None, **spec: Any) -> Ref:
        """As somebody's `kubectl apply` does."""
        about = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        obj: Json = {"apiVersion": "kelvin.dev/v1alpha1", "kind": kind, "metadata": about}
        ref = Ref.of(obj)
        held = deepcopy(self.objects.get(ref)) or self._new(obj)
        if held.get("spec") != spec:
            held["metadata"]["generation"] += 1
        self._put({**held, "spec": spec})
        return ref

    def withdraw(self, ref: Ref) -> None:
        """As `kubectl delete` does: what bears a finalizer stays for now."""
        held = deepcopy(self.objects[ref])
        held["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._put(held)

    async def apply(self, obj: Json) -> Json:
        ref = self._write("apply", obj)
        held = deepcopy(self.objects.get(ref)) or self._new(obj)
        finalizers = obj["metadata"].get("finalizers", [])
        held["metadata"] = {**held["metadata"], **deepcopy(obj["metadata"]), "finalizers": finalizers}
        return await self._answer(self._put({**held, **({"spec": obj["spec"]} if "spec" in obj else {})}))

    async def apply_status(self, obj: Json) -> Json:
        ref = self._write("status", {**obj, "metadata": {**obj["metadata"], "uid": None}})  # no uid is sent with one
        if ref not in self.objects:
            raise ClusterError(Missing("no such object"))
        return await self._answer(self._put({**deepcopy(self.objects[ref]), "status": deepcopy(obj["status"])}))

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        self.writes.append(("delete", ref))
        self._drop(ref)

    async def exists(self, ref: Ref) -> bool:
        return ref in self.objects

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((Ref.of(about), reason, message, warning))

    async def watch(self, api_version: str, kind: str, *, labels: str = "") -> AsyncGenerator[Change, None]:
        mine: asyncio.Queue[Change] = asyncio.Queue()
        self.watching.append((kind, mine))
        try:
            shown = tuple(deepcopy(obj) for ref, obj in self.objects.items() if ref.kind == kind)
            yield Synced(shown, str(self._version))
            while True:
                yield await mine.get()
        finally:
            self.watching.remove((kind, mine))

    def conditions(self, ref: Ref) -> dict[str, tuple[str, str]]:
        """Of its status: what each says, and why."""
        told = (self.objects[ref].get("status") or {}).get("conditions") or ()
        return {each["type"]: (each["status"], each["reason"]) for each in told}

    def of(self, kind: str) -> list[Json]:
        """All of that kind."""
        return [obj for ref, obj in self.objects.items() if ref.kind == kind]

    async def _answer(self, obj: Json) -> Json:
        await self.answered.wait()
        return obj

    def _write(self, what: str, obj: Json) -> Ref:
        if self.away:
            raise ClusterError(Unreachable("away"))
        ref, uid = Ref.of(obj), obj["metadata"].get("uid")
        self.writes.append((what, ref))
        if uid is not None and (ref not in self.objects or self.objects[ref]["metadata"]["uid"] != uid):
            raise ClusterError(Conflict("another object, or none"))  # as an apply with a uid is answered
        return ref

    def _new(self, obj: Json) -> Json:
        self._uid += 1
        return {**obj, "metadata": {**obj["metadata"], "uid": f"uid-{self._uid}", "generation": 0}}

    def _put(self, obj: Json) -> Json:
        ref, about = Ref.of(obj), obj["metadata"]
        if "deletionTimestamp" in about and not about.get("finalizers"):
            self._drop(ref)
        elif obj != self.objects.get(ref):
            self._version += 1
            about["resourceVersion"] = str(self._version)
            self.objects[ref] = obj
            self._tell(ref.kind, Upsert(deepcopy(obj)))
        return deepcopy(obj)

    def _drop(self, ref: Ref) -> None:
        gone = self.objects.pop(ref, None)
        if gone is not None:
            self._version += 1
            self._tell(ref.kind, Gone(ref, gone["metadata"]["uid"], str(self._version)))
            for owned in [each for each, obj in self.objects.items() if _is_owned(obj, gone)]:
                self._drop(owned)

    def _tell(self, kind: str, change: Change) -> None:
        for watched, mine in self.watching:
            if watched == kind:
                mine.put_nowait(change)


def _is_owned(obj: Json, owner: Json) -> bool:
    return any(each["uid"] == owner["metadata"]["uid"] for each in obj["metadata"].get("ownerReferences") or ())
