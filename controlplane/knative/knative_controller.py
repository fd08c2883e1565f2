"""Run versions on a cluster: write a Knative Service for each that may be served, and watch their pods.

Knative decides how many pods each has. The wanted Services follow from the registry and the cluster, the feed to
activators from the cluster alone (`version_status.py`). So `run` may be cancelled anywhere: the next leader continues.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from typing import Final

from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Busy, Json, Ref, Unreachable, WriteConflict
from controlplane.knative.apply.object_cache import UidTracker, follow
from controlplane.knative.policy.apply_steps import is_foreign
from controlplane.knative.policy.knative_service import SERVICE_API, namespace_of
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements
from controlplane.knative.policy.object_labels import OURS_SELECTOR, NamespacedName
from controlplane.knative.policy.object_status import PRIVATE_SLICES, parse_slice_pods
from controlplane.knative.pools.pool_controller import PoolController
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.knative.services.rollout import Rollout, unchanged_service
from controlplane.knative.services.service_renderer import (
    ServiceRenderer,
    namespaced_service_name,
    versions_with_service,
)
from controlplane.knative.services.tenant_namespaces import TenantNamespaces
from controlplane.knative.services.version_status import VersionStatusPublisher
from controlplane.registry.policy.domain import Model, VersionKey
from controlplane.registry.policy.domain import Version as ModelVersion
from controlplane.scaling.kpa.minimums import Minimums
from controlplane.scaling.kpa.report_coverage import ReportCoverage
from controlplane.scaling.policy.replacement_steps import previous_versions, recently_ready_versions
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.policy.start_problem import problem_from_failure
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import StartProblem, Stats
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.process.loops import Loops

SLICE_API: Final = "discovery.k8s.io/v1"
NAMESPACE_WAIT_S: Final = 2.0  # longest wait for the first probe of a namespace
REFUSAL_POLL_S: Final = 2.0  # between two checks for refused objects
TRANSIENT: Final = {each.reason for each in (Busy, WriteConflict, Unreachable)}  # refusals that may pass
TRANSIENT_S: Final = 30.0  # a transient refusal that lasts longer fails the waiting requests
ROLLOUT_STALL_POLLS: Final = 15  # times REFUSAL_POLL_S, between two checks of a stalled roll-out


class KnativeController:
    """Writes and watches the Services of all versions, in the process that leads. Also the routes' `Scaler`."""

    def __init__(
        self,
        context: ControllerContext,
        renderer: ServiceRenderer,
        pools: PoolController,
        overlap_s: float,
    ) -> None:
        """A version that fits a pod of `pools` has no Service of its own. For `overlap_s` after a newly named version
        is ready, the previous version takes the requests that it can't take yet.
        """
        self._api, self._models, self._feed = context.api, context.registry, context.feed
        self._outcomes, self._pods, self._clock = context.outcomes, context.pods, context.clock
        self._renderer = renderer
        self._minimums = Minimums(self._models.all_models, self._pods, self._feed)
        self._pools = pools
        self._overlap_s = overlap_s
        self._version_status = VersionStatusPublisher(context, renderer.cluster)
        self._changed = asyncio.Event()  # the wanted Services may have changed
        self._rollout_changed = asyncio.Event()  # a roll-out may continue
        requirements = NamespaceRequirements.of(renderer.cluster)
        self._namespaces = TenantNamespaces(self._api, requirements, self._clock, self._changed.set)
        self.node_forecasts = self._version_status.node_forecasts
        self.synced = asyncio.Event()  # every object was seen once
        self._published_failures: dict[VersionKey, Failure] = {}  # published reasons of versions that can't be rendered
        self._published_refusals: set[VersionKey] = set()  # versions whose refused Service was published
        self._revisions, self._slices = UidTracker(), UidTracker()  # objects seen, also by an earlier run
        self._begin()

    def __repr__(self) -> str:
        return f"<KnativeController {self._version_status!r} {self._pods!r} {self._applier!r}>"

    def _begin(self) -> None:
        """Forget the wanted Services. Published facts stay until all is seen again, start problems until they end."""
        self.synced.clear()
        self._pools.reset_view()
        self._applier = Applier(
            self._api,
            SERVICE_API,
            "Service",
            self._clock,
            self._renderer.own_namespace,
            on_changed=self._service_changed,
        )
        self._rollout = Rollout(
            self._applier.find_observed, self._version_status.failure_of, self._pods, self._clock,
            self._renderer.own_namespace, self._renderer.cluster.features,
        )  # fmt: skip
        self._outcomes.images_behind = {}
        self._overlap = False  # an old version of some model still serves
        self._report_coverage = ReportCoverage(self._feed.reader_names)
        self._without_minimum: frozenset[str] = frozenset()  # tenants without minimums at the last check
        self._render_failures: dict[VersionKey, Failure] = {}  # of the last rendering of all versions
        self._refused_since_s: dict[VersionKey, float] = {}
        self._changed.set()

    def refusals(self) -> Counter[str]:
        """Return how many objects differ from their wanted state, by reason (one word)."""
        return Counter(each.reason for each in self._applier.refusals().values())

    # -- as `Scaler` --

    def observe(self, stats: Stats) -> None:
        """Pass reports to the pools. Of other versions, activators report to Knative's autoscaler."""
        self._pools.observe(stats)

    def tick(self) -> None:
        """Render again soon, because the wanted Services may have changed."""
        self._changed.set()
        self._pools.tick()

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """Stop versions whose tenant is suspended, or that are deleted. The registry already says so."""
        self._pools.stop(keys)
        self.tick()

    def find_previous_versions(self, model: Model) -> dict[str, str]:
        """Return for each newly named version the previous one, by when their Services became ready."""
        live_versions = [version.key for version in model.live_versions]
        named = [key for key in live_versions if key.version in model.named]
        if not recently_ready_versions(model.named, self._ready_since(named), self._now_s(), self._overlap_s):
            return {}  # usually, whatever other versions there are
        return previous_versions(model.named, self._ready_since(live_versions), self._now_s(), self._overlap_s)

    def _ready_since(self, keys: Iterable[VersionKey]) -> dict[str, float]:
        every = ((key.version, self._ready_since_s(key)) for key in keys)
        return {version: since_s for version, since_s in every if since_s is not None}

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if a cluster can't scale the model that way."""
        self._renderer.check(model, scale)
        self._minimums.check(model, scale)
        self._pools.check_scale(model, scale)

    # -- loops --

    async def run(self) -> None:
        """Run until cancelled. Raises the errors of its watches. A later run starts from the cluster's state then.

        Work that only acts on observed state runs in loops of its own, so its errors end no watch.
        """
        self._begin()
        revisions, slices = asyncio.Event(), asyncio.Event()
        async with Loops() as loops, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._applier.run(), name="apply services")
            tasks.create_task(
                follow(
                    self._api,
                    SERVICE_API,
                    "Revision",
                    OURS_SELECTOR,
                    self._version_status.on_revision,
                    revisions,
                    self._revisions,
                )
            )
            tasks.create_task(
                follow(self._api, SLICE_API, "EndpointSlice", PRIVATE_SLICES, self._slice, slices, self._slices)
            )
            loops.start("node waits", self.node_forecasts.run)
            loops.start("tenant spaces", self._namespaces.run)
            for first in (self._applier.synced, revisions, slices):
                await first.wait()
            for ref in [
                Ref(SERVICE_API, "Service", *object_name) for object_name in self._version_status.service_names()
            ]:
                if self._applier.find_observed(ref) is None:
                    self._service_changed(ref)  # it was deleted while no watch ran
            await self._pools.adopt()
            self._report_coverage.start(self._now_s())
            self._models.republish_meanwhile()
            self.synced.set()
            loops.start("pools", self._pools.run)
            loops.start("wanted objects", self._apply_wanted)
            loops.start("roll-out", self._roll_out)
            loops.start("refusals", self._check_periodically)

    async def _apply_wanted(self) -> None:
        """Render and apply all Services after each change. Needs a full view: it tells which old versions stay."""
        self._changed.set()  # after an error the loop starts again and does all work again
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._models.republish_meanwhile()
            models = self._models.all_models()
            self._overlap = any(
                model.meanwhile or (len(model.versions) > 1 and not self._is_report_window_over(model))
                for model in models
            )
            versions = versions_with_service(
                models, self._has_service, self._is_ready, self._has_ready_pod, self._is_report_window_over
            )
            placeable, lacking = self._select_placeable(
                each for each in versions if not self._pools.pooled_models.is_pooled(*each)
            )
            objects, failed = self._renderer.render_all(placeable, self._has_no_minimum)
            failed |= lacking
            # Set this before anything that may fail: `_roll_out` continues with these renderings, and must know the
            # failed ones.
            self._render_failures = failed
            self._rollout.set_rendered(objects, self._renderer.key_by_service)
            self._choose_rollout()
            self._applier.set_wanted(self._wanted_services())
            for key, failure in failed.items():
                if self._published_failures.get(key) != failure:
                    self._version_status.fail_version(key, failure)
            for key in self._published_failures.keys() - failed.keys():
                self._outcomes.clear_problem(key, problem_from_failure(self._published_failures[key]).reason)
            self._published_failures = failed

    async def _roll_out(self) -> None:
        """Continue the roll-out after a Service, a pod or the time has changed. Renders nothing again."""
        while True:
            await self._rollout_changed.wait()
            self._rollout_changed.clear()
            if self._choose_rollout():
                self._applier.set_wanted(self._wanted_services())

    def _choose_rollout(self) -> bool:
        """Choose the next Services of the roll-out. Return whether the wanted Services may have changed."""
        is_changed = self._rollout.choose(self._applier.refusals())
        self._outcomes.images_behind = self._rollout.images_behind
        return is_changed

    def _wanted_services(self) -> Iterator[Json]:
        """Yield all Services that the cluster should have."""
        yield from self._rollout.chosen.values()
        # A version that can't be rendered keeps its Service as it is, so it continues to serve.
        for key in self._render_failures:
            if self._has_service(key):
                ref = Ref(SERVICE_API, "Service", *namespaced_service_name(key, self._renderer.cluster))
                observed = self._applier.find_observed(ref)
                if ref not in self._rollout.chosen and observed is not None:
                    yield unchanged_service(observed)
        yield from filter(self._is_placed, self._pools.services())

    def _select_placeable(
        self, versions: Iterable[tuple[Model, ModelVersion]]
    ) -> tuple[list[tuple[Model, ModelVersion]], dict[VersionKey, Failure]]:
        """Return the versions whose Service exists or may be created, and for the others the reason to wait.

        An existing Service stays wanted even if its namespace has lost something that new Services need.
        """
        placeable, lacking, namespaces = [], dict[VersionKey, Failure](), set[str]()
        for model, version in versions:
            key = version.key
            try:
                namespace, name = namespaced_service_name(key, self._renderer.cluster)
            except Refused:
                namespace = self._renderer.own_namespace
            if namespace == self._renderer.own_namespace:
                placeable.append((model, version))  # rendering refuses it with the reason
                continue
            namespaces.add(namespace)
            is_complete = self._namespaces.is_complete(namespace, key.tenant)
            if is_complete or self._applier.find_observed(Ref(SERVICE_API, "Service", namespace, name)) is not None:
                placeable.append((model, version))
            elif (failure := self._namespaces.failure(namespace, key.tenant)) is not None:
                lacking[key] = failure
        self._namespaces.retain(namespaces | {namespace for namespace, _ in self._pools.service_names()})
        return placeable, lacking

    def _is_placed(self, obj: Json) -> bool:
        """Return whether a pool's Service exists or may be created."""
        ref = Ref.of(obj)
        return self._namespaces.is_complete(ref.namespace or "", "") or self._applier.find_observed(ref) is not None

    async def find_start_obstacle(self, tenant: str) -> StartProblem | None:
        """Return what the tenant's namespace lacks to start versions; None if nothing, or not known in time."""
        with suppress(Refused):
            namespace = namespace_of(tenant, self._renderer.cluster)
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_WAIT_S):
                    await self._namespaces.wait_until_known(namespace, tenant)
            failure = self._namespaces.failure(namespace, tenant)
            return None if failure is None else problem_from_failure(failure)
        return None

    async def _check_periodically(self) -> None:
        """Check what no watch shows: the end of an overlap, minimums that ended, a stalled roll-out, refusals."""
        for tick in count():
            await self._clock.sleep(REFUSAL_POLL_S)
            without_minimum = frozenset(
                model.tenant
                for model in self._models.all_models()
                if model.scale.min and self._has_no_minimum(model.tenant)
            )
            if self._overlap or without_minimum != self._without_minimum:
                self._without_minimum = without_minimum
                self._changed.set()
            if self._rollout.is_moving or (self._rollout.images_behind and tick % ROLLOUT_STALL_POLLS == 0):
                self._rollout_changed.set()
            self._publish_refusals()

    def _publish_refusals(self) -> None:
        refused = self._find_refused()
        for key in sorted(refused - self._published_refusals):
            failure = StartFailed("the cluster does not take its Service", "refused_object")
            self._version_status.fail_version(key, failure)
        for key in sorted(self._published_refusals - refused):
            self._outcomes.clear_problem(key, "refused_object")
        self._published_refusals = refused

    def _find_refused(self) -> set[VersionKey]:
        """Return the versions that have no Service because the cluster refuses it. A transient refusal counts after
        TRANSIENT_S.
        """
        now_s, reasons = self._now_s(), dict[VersionKey, str]()
        for ref, refusal in self._applier.refusals().items():
            key = self._renderer.key_by_service.get(ref.namespaced_name)
            if key is not None and self._find_own(ref) is None:
                reasons[key] = refusal.reason
        self._refused_since_s = {key: self._refused_since_s.get(key, now_s) for key in reasons}
        return {
            key
            for key, reason in reasons.items()
            if reason not in TRANSIENT or now_s - self._refused_since_s[key] >= TRANSIENT_S
        }

    # -- observed objects --

    def _service_changed(self, ref: Ref) -> None:
        object_name, obj = ref.namespaced_name, self._find_own(ref)
        if self._pools.on_service(object_name, obj):
            return
        before, found = self._version_status.on_service(object_name, obj, is_new=self.synced.is_set())
        if (before is None) != (found is None) or (before and found and bool(before.ready) != bool(found.ready)):
            self._changed.set()  # an old version may be removed now
        elif before and found and before.ready != found.ready:
            self._rollout_changed.set()

    def _slice(self, object_name: NamespacedName, obj: Json | None) -> None:
        found = None if obj is None else parse_slice_pods(obj)
        self._pools.on_slice(object_name, found)
        self._version_status.on_slice(object_name, found)

    def _find_own(self, ref: Ref) -> Json | None:
        """Return the object as it was last seen; None if another installation owns it."""
        obj = self._applier.find_observed(ref)
        return obj if obj is None or not is_foreign(obj, self._renderer.own_namespace) else None

    def _has_no_minimum(self, tenant: str) -> bool:
        return self._feed.is_suspended(tenant) or self._feed.is_spent(tenant)

    def _has_service(self, key: VersionKey) -> bool:
        return self._version_status.find(key) is not None

    def _is_ready(self, key: VersionKey) -> bool:
        return self._ready_since_s(key) is not None

    def _ready_since_s(self, key: VersionKey) -> float | None:
        """Return since when the version has been ready; None if it never was. A version of a pool always was."""
        return -inf if self._pools.pooled_models.find(key) is not None else self._version_status.ready_since_s(key)

    def _is_report_window_over(self, model: Model) -> bool:
        return self._report_coverage.is_window_over(model, self._now_s())

    def _has_ready_pod(self, key: VersionKey) -> bool:
        return self._pods.ready_count(key) > 0

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / 1e6
