"""Keep the observed state of a cluster, and decide which of it is news for activators. Pure but for its own state.

Objects may come in any order, and repeatedly. A pod is news once its Service is known, and again after each change. A
failed start is news once each time it happens, unless another replica serves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.knative.policy.object_status import RevisionFailure, Service, SlicePods, replica_row, revision_row
from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.serving.control_messages import ReplicaRow, RevisionRow

VersionName = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class FeedChanges:
    """Facts that activators don't know yet. `failed` are versions without a replica, and why."""

    revisions: tuple[RevisionRow, ...] = ()
    removed_revisions: tuple[VersionName, ...] = ()
    replicas: tuple[ReplicaRow, ...] = ()
    removed_replicas: tuple[str, ...] = ()
    failed: tuple[tuple[VersionKey, RevisionFailure], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.revisions or self.removed_revisions or self.replicas or self.removed_replicas or self.failed)


@dataclass(slots=True)
class _Published:
    """Facts of one Service that were published to activators."""

    revision: RevisionRow | None = None
    replicas: dict[str, ReplicaRow] = field(default_factory=dict)
    failed: tuple[str, RevisionFailure] | None = None


class WatchCache:
    """All Services, failed revisions, and pods. Each call takes one object; None if it is gone."""

    def __init__(self) -> None:
        self._services: dict[NamespacedName, Service] = {}
        self._failed: dict[NamespacedName, RevisionFailure] = {}
        self._slices: dict[NamespacedName, SlicePods] = {}
        self._slices_of: dict[NamespacedName, dict[NamespacedName, None]] = {}
        self._service_of: dict[NamespacedName, NamespacedName] = {}  # by revision
        self._published: dict[NamespacedName, _Published] = {}

    def __repr__(self) -> str:
        return f"<WatchCache services={len(self._services)} slices={len(self._slices)} failed={len(self._failed)}>"

    def service_at(self, object_name: NamespacedName) -> Service | None:
        """Return the Service of a version that is at `object_name`, else None."""
        return self._services.get(object_name)

    def failure_of(self, revision: NamespacedName) -> RevisionFailure | None:
        """Return why that Revision failed; None if it did not."""
        return self._failed.get(revision)

    def update_service(self, object_name: NamespacedName, service: Service | None) -> FeedChanges:
        """Store a version's Knative Service; None if there is none at `object_name` any more."""
        before = self._services.pop(object_name, None)
        if before is not None:
            self._service_of.pop((object_name[0], before.serving), None)
        if service is not None:
            self._services[object_name] = service
            self._service_of[object_name[0], service.serving] = object_name
        return self._update(object_name)

    def update_revision(self, object_name: NamespacedName, failed: RevisionFailure | None) -> FeedChanges:
        """Store a Revision's failure; None if it has not failed, or is gone."""
        if failed is None:
            self._failed.pop(object_name, None)
        else:
            self._failed[object_name] = failed
        service = self._service_of.get(object_name)
        return FeedChanges() if service is None else self._update(service)

    def update_slice(self, object_name: NamespacedName, slice_pods: SlicePods | None) -> FeedChanges:
        """Store the pods of an EndpointSlice; None if it is gone."""
        before = self._slices.pop(object_name, None)
        if before is not None:
            owner = (object_name[0], before.service)
            del self._slices_of[owner][object_name]
            if not self._slices_of[owner]:
                del self._slices_of[owner]
        if slice_pods is not None:
            self._slices[object_name] = slice_pods
            self._slices_of.setdefault((object_name[0], slice_pods.service), {})[object_name] = None
        owners = {(object_name[0], each.service) for each in (before, slice_pods) if each is not None}
        return _merge(self._update(owner) for owner in sorted(owners))

    def service_names(self) -> tuple[NamespacedName, ...]:
        """Return where Services of versions are."""
        return tuple(self._services)

    def check_integrity(self) -> None:
        """Assert that indexes agree, and that nothing is published about missing Services."""
        assert {object_name for ids in self._slices_of.values() for object_name in ids} == set(self._slices)
        assert all(self._slices_of.values())
        for object_name, published in self._published.items():
            assert object_name in self._services, "a Service that is gone is still published"
            assert published.revision is not None or published.replicas or published.failed, "an empty row stays"

    def _update(self, object_name: NamespacedName) -> FeedChanges:
        service, published = self._services.get(object_name), self._published.get(object_name, _Published())
        revision = None if service is None else revision_row(service, object_name)
        replicas = {} if service is None else self._replicas(object_name, service)
        failed = None if service is None else self._failure(object_name, service)
        changes = FeedChanges(
            revisions=() if revision is None or revision == published.revision else (revision,),
            removed_revisions=tuple(
                _name(row) for row in (published.revision,) if row and (not revision or _name(revision) != _name(row))
            ),
            replicas=tuple(row for name, row in replicas.items() if published.replicas.get(name) != row),
            removed_replicas=tuple(name for name in published.replicas if name not in replicas),
            failed=()
            if service is None or failed is None or failed == published.failed
            else ((service.key, failed[1]),),
        )
        if revision is None and not replicas and failed is None:
            self._published.pop(object_name, None)
        else:
            self._published[object_name] = _Published(revision, replicas, failed)
        return changes

    def _replicas(self, object_name: NamespacedName, service: Service) -> dict[str, ReplicaRow]:
        found: dict[str, ReplicaRow] = {}
        for slice_name in sorted(self._slices_of.get(object_name, ())):
            for pod in self._slices[slice_name].pods:
                found.setdefault(pod.name, replica_row(service, pod))  # a pod may have two addresses; one is enough
        return found

    def _failure(self, object_name: NamespacedName, service: Service) -> tuple[str, RevisionFailure] | None:
        if service.is_being_deleted:
            return None
        if service.refused:
            return "", RevisionFailure(service.refused, "")
        found = self._failed.get((object_name[0], service.serving))
        published = self._published.get(object_name)
        if found is None or (published is not None and published.failed == (service.serving, found)):
            return None if found is None else (service.serving, found)
        serves = any(not (row.unproven or row.draining) for row in self._replicas(object_name, service).values())
        return None if serves else (service.serving, found)


def _merge(every: Iterable[FeedChanges]) -> FeedChanges:
    found = tuple(every)
    return FeedChanges(
        revisions=tuple(row for each in found for row in each.revisions),
        removed_revisions=tuple(row for each in found for row in each.removed_revisions),
        replicas=tuple(row for each in found for row in each.replicas),
        removed_replicas=tuple(row for each in found for row in each.removed_replicas),
        failed=tuple(row for each in found for row in each.failed),
    )


def _name(row: RevisionRow) -> VersionName:
    return row.tenant, row.model, row.version
