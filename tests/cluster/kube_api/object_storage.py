"""The storage rules of an API server, in memory and without HTTP: create, read, update, patch, apply, delete.

Methods may be called from any thread. Returned objects are copies. Refusals are `status_answers.Refused`.
"""

import copy
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.cluster.kube_api import status_answers
from tests.cluster.kube_api.event_store import EventStore, ListQuery, number
from tests.cluster.kube_api.field_ownership import Manager, applied, bare, updated
from tests.cluster.kube_api.field_sets import UndeclaredField
from tests.cluster.kube_api.json_patches import Failed, merged, patched, strategic
from tests.cluster.kube_api.kinds import Kind, Kinds
from tests.cluster.kube_api.knative_webhook import KnativeWebhook
from tests.cluster.kube_api.objects import PLAIN, Options, accept, decoded, now, tidy
from tests.cluster.kube_api.status_answers import Cause, Json, Refused, invalid, modified, not_found, refused
from tests.cluster.kube_api.structural_schemas import defaulted
from tests.cluster.kube_api.watches import Watch

# Kinds whose updates must name the version that was read.
CONDITIONAL: Final = ("leases", "customresourcedefinitions")
SYSTEMS: Final = (
    "uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink",
)  # fmt: skip
OTHER_NAMESPACE: Final = "the namespace of the object does not match the namespace on the URL"
STRATEGIC: Final = "strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful response."""

    status: int
    body: Json


@dataclass(slots=True)
class ObjectStorage:
    """Objects under the rules of their kinds. `features` are Knative's flags (config-features)."""

    store: EventStore = field(default_factory=EventStore)
    kinds: Kinds = field(default_factory=Kinds)
    lock: threading.RLock = field(default_factory=threading.RLock)
    webhook: KnativeWebhook = field(default_factory=KnativeWebhook)

    # -- reading

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        with self.lock:
            return copy.deepcopy(self.stored(kind, namespace, name))

    def listed(self, kind: Kind, namespace: str | None, query: dict[str, str] | None = None) -> Json:
        with self.lock:
            return copy.deepcopy(self.store.listed(kind, ListQuery.read(namespace, query or {})))

    def watch(self, kind: Kind, namespace: str | None, query: dict[str, str]) -> Watch:
        with self.lock:
            return Watch(self.store, kind, namespace, query)

    def stored(self, kind: Kind, namespace: str, name: str) -> Json:
        found = self.store.get(kind, namespace, name)
        if found is None:
            raise not_found(kind.named(name))
        return found

    # -- writing

    def create(self, kind: Kind, namespace: str, body: Json, options: Options = PLAIN) -> Answer:
        with self.lock:
            obj = decoded(kind, copy.deepcopy(body))
            metadata = obj["metadata"]
            if kind.namespaced and metadata.setdefault("namespace", namespace) != namespace:
                text = "the namespace of the provided object does not match the namespace sent on the request"
                raise refused(400, text)
            return self._create(kind, obj, options, lambda new: self._updated(kind, {}, new, options))

    def _create(self, kind: Kind, obj: Json, options: Options, own: Callable[[Json], Json]) -> Answer:
        metadata = obj["metadata"]
        self._check_namespace(kind, metadata.get("namespace", ""))
        for name in (*SYSTEMS, "resourceVersion", "managedFields"):
            metadata.pop(name, None)
        if kind.has_status and kind.stored != ("", "namespaces"):
            obj.pop("status", None)
        obj = own(obj)
        obj = self.webhook.mutate(kind, None, obj, options.user)
        obj = self._prepared(kind, obj)
        accept(kind, obj, old=None)
        self.webhook.validate(kind, obj)
        if self.store.get(kind, metadata.get("namespace", ""), obj["metadata"]["name"]) is not None:
            raise status_answers.exists(kind.named(obj["metadata"]["name"]))
        obj["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.generations:
            obj["metadata"]["generation"] = 1
        return Answer(201, copy.deepcopy(self._put(kind, obj)))

    def _prepared(self, kind: Kind, obj: Json) -> Json:
        obj["metadata"] = tidy(obj["metadata"])
        if kind.custom:
            found: Json = defaulted(kind.schema, obj)
            return found
        if kind.stored == ("", "namespaces"):
            labels = obj["metadata"].setdefault("labels", {})
            labels["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")
            obj = obj | {"spec": {"finalizers": ["kubernetes"]}, "status": obj.get("status") or {"phase": "Active"}}
        found = {key: value for key, value in obj.items() if value not in ({}, None) or key == "spec"}
        if kind.plural == "endpointslices":  # without `omitempty`: a slice that is empty has nulls
            found |= {name: obj.get(name) or None for name in ("endpoints", "ports")}
        return found

    def _put(self, kind: Kind, obj: Json) -> Json:
        if kind.plural == "customresourcedefinitions":
            obj = obj | {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
            self.kinds.define(obj)
            self.store.start_watch_cache(self.kinds.of_definition(obj))
        return self.store.upsert(kind, obj)

    def _check_namespace(self, kind: Kind, namespace: str) -> None:
        spaces = self.kinds.of("v1", "Namespace")
        if kind.namespaced and self.store.get(spaces, "", namespace) is None:
            raise not_found(spaces.named(namespace))

    def update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Json,
        options: Options = PLAIN,
        *,
        sub: str = "",
    ) -> Answer:
        """Handle a PUT."""
        with self.lock:
            obj = decoded(kind, copy.deepcopy(body))
            metadata = obj["metadata"]
            if metadata.get("name", "") != name:
                raise _misnamed(metadata.get("name", ""), name)
            if kind.namespaced and metadata.setdefault("namespace", namespace) != namespace:
                raise refused(400, OTHER_NAMESPACE)
            old = self.store.get(kind, namespace, name)
            if old is None:
                raise not_found(kind.named(name))
            if not metadata.get("resourceVersion") and (kind.custom or kind.plural in CONDITIONAL):
                cause = Cause.value("metadata.resourceVersion", "0", "must be specified for an update")
                raise invalid(kind.named(name), [cause], by_resource=True)
            new = self._updated(kind, old, self._laid(kind, old, obj, sub), options, sub)
            return self._write(kind, old, new, options)

    def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Any,
        how: str,
        options: Options = PLAIN,
        *,
        sub: str = "",
    ) -> Answer:
        """Handle a PATCH other than apply. `how` is the content type without `application/`."""
        with self.lock:
            old = self.stored(kind, namespace, name)
            if how == "json-patch+json":
                try:
                    body = patched(old, body)
                except Failed as error:
                    text = "the server rejected our request due to an error in our request"
                    raise refused(422, text, reason="Invalid", details={}) from error
            else:
                body = strategic(kind.schema, old, body) if how == STRATEGIC else merged(old, body)
            obj = decoded(kind, copy.deepcopy(body))
            new = self._updated(kind, old, self._laid(kind, old, obj, sub), options, sub)
            return self._write(kind, old, new, options)

    def apply(self, kind: Kind, namespace: str, name: str, body: Json, options: Options, *, sub: str = "") -> Answer:
        """Handle a server-side apply."""
        with self.lock:
            config = copy.deepcopy(body)
            metadata = config.setdefault("metadata", {})
            if metadata.get("managedFields") is not None:
                raise refused(400, "metadata.managedFields must be nil")
            if (config.get("apiVersion"), config.get("kind")) != (kind.api_version, kind.kind):
                group, _, version = str(config.get("apiVersion", "")).rpartition("/")
                raise refused(400, f"invalid object type: {group}/{version}, Kind={config.get('kind', '')}")
            old = self.store.get(kind, namespace, name)
            if old is None and sub:
                raise not_found(kind.named(name))
            if old is None and metadata.get("uid"):
                raise status_answers.nobody(kind.named(name), metadata["uid"])
            who = Manager("Apply", options.manager, kind.api_version, sub)
            new = self._applied(kind, old or {}, config, who, options)
            found = new["metadata"]
            if found.setdefault("name", name) != name:
                raise _misnamed(found["name"], name)
            if kind.namespaced and found.setdefault("namespace", namespace) != namespace:
                raise refused(400, OTHER_NAMESPACE)
            if old is None:
                entries = found.get("managedFields")
                return self._create(kind, new, options, lambda obj: _with_entries(obj, entries))
            version = metadata.get("resourceVersion")
            found["resourceVersion"] = version or old["metadata"]["resourceVersion"]
            entries = found.pop("managedFields", None)
            laid = _with_entries(self._laid(kind, old, new, sub), entries)
            return self._write(kind, old, laid, options)

    def _applied(self, kind: Kind, old: Json, config: Json, who: Manager, options: Options) -> Json:
        try:
            return applied(kind.schema, old, config, who, force=options.force, now=now(), has_status=kind.has_status)
        except UndeclaredField as error:
            metadata = config["metadata"]
            where = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}; {kind.api_version}, Kind={kind.kind}"
            listed = error.faults[0] if len(error.faults) == 1 else "\n  ".join(["errors:", *error.faults])
            text = f"failed to create typed patch object ({where}): {listed}"
            raise refused(500, text, reason=None) from error

    def _updated(self, kind: Kind, old: Json, new: Json, options: Options, sub: str = "") -> Json:
        live = old or {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": {}}
        if not old and not kind.custom:
            live["spec"] = {}
        who = Manager("Update", options.manager or "unknown", kind.api_version, sub)
        return updated(kind.schema, live, new, who, now=now(), has_status=kind.has_status)

    def _laid(self, kind: Kind, old: Json, new: Json, sub: str) -> Json:
        """Return the part of a write that counts: only the status for the status subresource, all but the status
        otherwise.
        """
        if sub == "status":
            found = bare(old) | {"metadata": dict(old["metadata"])}
            for name in ("resourceVersion", "uid"):
                if new["metadata"].get(name):
                    found["metadata"][name] = new["metadata"][name]
            found.pop("status", None)
            return found | ({"status": new["status"]} if new.get("status") else {})
        if kind.has_status:
            new = {key: value for key, value in new.items() if key != "status"}
            new |= {"status": old["status"]} if "status" in old else {}
        return new

    def _write(self, kind: Kind, old: Json, new: Json, options: Options) -> Answer:
        """Run the checks and effects that all changes share."""
        name, was, metadata = old["metadata"]["name"], old["metadata"], dict(new["metadata"])
        new = new | {"metadata": metadata}
        if (version := metadata.get("resourceVersion")) and number(version) != int(was["resourceVersion"]):
            raise modified(kind.named(name))
        if metadata.get("uid", was["uid"]) != was["uid"]:
            cause = Cause.value("metadata.uid", f'"{metadata["uid"]}"', "field is immutable")
            raise invalid(kind.named(name), [cause, cause])
        for each in SYSTEMS:
            metadata.pop(each, None)
            if each in was:
                metadata[each] = was[each]
        new = self.webhook.mutate(kind, old, new, options.user)
        new = self._prepared(kind, new)
        accept(kind, new, old=old)
        self.webhook.validate(kind, new)
        if kind.generations and _specified(kind, old) != _specified(kind, new):
            new["metadata"]["generation"] = was.get("generation", 0) + 1
        new["metadata"]["resourceVersion"] = was["resourceVersion"]
        if _without_times(new) == _without_times(old):
            new = old
        if new is old:
            return Answer(200, copy.deepcopy(new))
        if _released(new):
            self.remove(kind, old)
        else:
            new = self._put(kind, new)
        return Answer(200, copy.deepcopy(new))

    def remove(self, kind: Kind, old: Json) -> None:
        """Remove an object from the store, and a CRD's kinds with it. The lock is held."""
        self.store.remove(kind, old)
        if kind.plural == "customresourcedefinitions":
            self.kinds.forget(old)


def _misnamed(has: str, wants: str) -> Refused:
    return refused(400, f"the name of the object ({has}) does not match the name on the URL ({wants})")


def _with_entries(obj: Json, entries: Any) -> Json:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return obj | {"metadata": metadata | ({"managedFields": entries} if entries else {})}


def _without_times(obj: Json) -> Json:
    """Return the object without the times of its `managedFields`. A write that changes only these changes nothing."""
    entries = [
        {name: each for name, each in entry.items() if name != "time"}
        for entry in obj["metadata"].get("managedFields", [])
    ]
    return _with_entries(obj, entries)


def _specified(kind: Kind, obj: Json) -> Json:
    """Return the fields whose changes `generation` counts."""
    left = ("apiVersion", "kind", "metadata", *(("status",) if kind.has_status else ()))
    return {key: value for key, value in obj.items() if key not in left}


def _released(obj: Json) -> bool:
    return bool(obj["metadata"].get("deletionTimestamp")) and not obj["metadata"].get("finalizers")
