"""Process the observed state of versions on a cluster: tell activators, update the pod table, record start outcomes.

`knative/policy/watch_cache.py` decides what is new. `knative_controller.py` decides which Services should exist.
"""

import logging
from contextlib import suppress
from math import inf

from controlplane.knative.apply.cluster import Json
from controlplane.knative.policy.knative_service import ClusterSpec
from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.knative.policy.object_status import (
    UNSCHEDULABLE,
    RevisionFailure,
    Service,
    SlicePods,
    parse_revision_failure,
    parse_service,
    start_failure,
)
from controlplane.knative.policy.pending_replicas import PodProblem
from controlplane.knative.policy.watch_cache import FeedChanges, WatchCache
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.knative.services.node_forecasts import NodeForecasts
from controlplane.knative.services.service_renderer import namespaced_service_name
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.start_problem import problem_from_failure
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import Feed, RestoreFailure

log = logging.getLogger(__name__)


class VersionStatusPublisher:
    """Services, Revisions and pods of versions, and since when each Service is ready. Use it from one event loop."""

    def __init__(self, context: ControllerContext, cluster: ClusterSpec) -> None:
        self._feed, self._outcomes = context.feed, context.outcomes
        self._pods, self._clock = context.pods, context.clock
        self._cluster = cluster
        self._watch_cache = WatchCache()
        self._ready_since_s: dict[NamespacedName, float] = {}  # ready Services, and since when they were seen ready
        self.node_forecasts = NodeForecasts(
            context.api, self._watch_cache.service_at, self._record_problem, self._feed, self._clock
        )

    def __repr__(self) -> str:
        return f"<VersionStatusPublisher {self._watch_cache!r}>"

    def service_names(self) -> tuple[NamespacedName, ...]:
        """Return the places of versions' Services, as last seen."""
        return self._watch_cache.service_names()

    # -- lookups

    def find(self, key: VersionKey) -> Service | None:
        """Return the version's own Service, unless it is being deleted."""
        with suppress(Refused):
            found = self._watch_cache.service_at(namespaced_service_name(key, self._cluster))
            if found is not None and not found.is_being_deleted and found.key == key:
                return found
        return None

    def ready_since_s(self, key: VersionKey) -> float | None:
        """Return since when the version's Service has been ready; None if it never was."""
        found = self.find(key)
        if found is None or not found.ready:
            return None
        return self._ready_since_s.get(namespaced_service_name(key, self._cluster), self._now_s())

    def failure_of(self, revision: NamespacedName) -> RevisionFailure | None:
        """Return why that Revision failed; None if it did not."""
        return self._watch_cache.failure_of(revision)

    # -- observed objects; None is an object that is gone

    def on_service(
        self, object_name: NamespacedName, obj: Json | None, *, is_new: bool
    ) -> tuple[Service | None, Service | None]:
        """Process a Knative Service. Return the version's Service that had this name before, and the one there now.

        `is_new`: it was created after this process began to watch. For an older one it is unknown since when it has
        been ready, so it counts as ready since long ago.
        """
        before = self._watch_cache.service_at(object_name)
        found = None if obj is None else self._if_ours(object_name, parse_service(obj))
        self._publish(self._watch_cache.update_service(object_name, found))
        if found is None or not found.ready:
            self._ready_since_s.pop(object_name, None)
        else:
            self._ready_since_s.setdefault(object_name, self._now_s() if is_new else -inf)
        return before, found

    def on_revision(self, object_name: NamespacedName, obj: Json | None) -> None:
        """Process a Revision, whose failure may be new."""
        self._publish(
            self._watch_cache.update_revision(object_name, None if obj is None else parse_revision_failure(obj))
        )

    def on_slice(self, object_name: NamespacedName, slice_pods: SlicePods | None) -> None:
        """Process the pods of an EndpointSlice."""
        self._publish(self._watch_cache.update_slice(object_name, slice_pods))

    def fail_version(self, key: VersionKey, failure: Failure) -> None:
        """Fail the requests that wait for a version which can't have its Service."""
        log.warning("a version has no Service", extra={"version": str(key), "why": failure.message})
        self._feed.publish(Feed(failures=(self._failure(key, failure),)))

    def _if_ours(self, object_name: NamespacedName, service: Service | None) -> Service | None:
        """Return the Service if it is at the place where Kelvin writes it, else None. Otherwise anyone who may create a
        Service in some namespace could receive another tenant's requests.
        """
        with suppress(Refused):
            if service is not None and object_name == namespaced_service_name(service.key, self._cluster):
                return service
        return None

    def _publish(self, changes: FeedChanges) -> None:
        if not changes:
            return
        # A version without a node still waits, and `NodeForecasts` says for how long. Its Revision fails if no node
        # comes in time.
        failed = [
            each for each in changes.failed if each[1].reason != UNSCHEDULABLE or not self.node_forecasts.is_known
        ]
        failures = tuple(self._failure(key, start_failure(why.reason)) for key, why in failed)
        for key, why in failed:
            log.warning("no replica came up", extra={"version": str(key), "why": why.reason})
        self._feed.publish(
            Feed(
                revisions=changes.revisions,
                removed_revisions=changes.removed_revisions,
                replicas=changes.replicas,
                removed_replicas=changes.removed_replicas,
                failures=failures,
            )
        )
        for row in changes.replicas:
            if (pod := self._pods.upsert(row)) is not None:
                self._outcomes.on_replica_ready(pod)
        for name in changes.removed_replicas:
            self._pods.remove(name)

    def _record_problem(self, service: Service, now: PodProblem | None, before: PodProblem | None) -> None:
        """Record why pods of a version are not ready. This is not a failed start: they may still start."""
        key = service.key
        if now is not None:
            self._outcomes.set_problem(key, problem_from_failure(start_failure(now.reason, now.exit_status)))
        elif before is not None:
            self._outcomes.clear_problem(key, start_failure(before.reason, before.exit_status).reason)

    def _failure(self, key: VersionKey, failure: Failure) -> RestoreFailure:
        self._outcomes.on_start_failed(key, failure)
        return RestoreFailure.from_failure(key.tenant, key.version, failure)

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / 1e6
