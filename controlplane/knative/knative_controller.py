"""Versions on a cluster: has a Knative Service written for each that may be served, and watches what becomes of them.

Knative decides how many pods each has. What is wanted follows from the registry and from what is there, and what
activators are told from what is seen (`version_status.py`). So this may be cancelled anywhere: the next leader goes on.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from typing import Final

from controlplane.clock import Clock
from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Busy, ClusterApi, Conflict, Json, Ref, Unreachable
from controlplane.knative.apply.object_cache import UidTracker, follow
from controlplane.knative.policy.apply_steps import owner_of
from controlplane.knative.policy.knative_service import namespace_of
from controlplane.knative.policy.namespace_requirements import NamespaceRequirements
from controlplane.knative.policy.object_labels import OURS_SELECTOR, NamespacedName
from controlplane.knative.policy.object_status import PRIVATE_SLICES, parse_slice_pods
from controlplane.knative.pools.pool_controller import PoolController
from controlplane.knative.services.pods import PodTable
from controlplane.knative.services.rollout import Rollout, unchanged_service
from controlplane.knative.services.service_renderer import (
    ServiceRenderer,
    namespaced_service_name,
    versions_with_service,
)
from controlplane.knative.services.tenant_namespaces import TenantNamespaces
from controlplane.knative.services.version_status import VersionStatusPublisher
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, VersionKey
from controlplane.registry.policy.domain import Version as ModelVersion
from controlplane.registry.registry import Registry
from controlplane.scaling.kpa.minimums import Minimums
from controlplane.scaling.kpa.takeover import Takeover
from controlplane.scaling.policy.replacement_steps import previous_versions, recently_ready_versions
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.policy.start_problem import problem_from_failure
from controlplane.scaling.start_outcomes import StartOutcomes
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.serving.control_messages import StartProblem, Stats
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.process.loops import Loops

SERVICE_API: Final = "serving.knative.dev/v1"
SLICE_API: Final = "discovery.k8s.io/v1"
NAMESPACE_WAIT_S: Final = 2.0  # at most, until a namespace that nobody asked about before was looked at
REFUSAL_POLL_S: Final = 2.0  # between two looks at what the cluster refuses
TRANSIENT: Final = {each.reason for each in (Busy, Conflict, Unreachable)}  # reasons of refusals
TRANSIENT_S: Final = 30.0  # a transient refusal that lasts longer fails the waiting requests
ROLLOUT_STALL_POLLS: Final = 15  # of REFUSAL_POLL_S between two looks at a roll-out in which no turn comes


class KnativeController:
    """One per installation: of whoever leads. Also the decider that the routes ask, for whom Knative decides."""

    def __init__(
        self,
        api: ClusterApi,
        models: Registry,
        feed: FeedHub,
        outcomes: StartOutcomes,
        pods: PodTable,
        renderer: ServiceRenderer,
        clock: Clock,
        has_no_minimum: Callable[[str], bool],
        pools: PoolController,
        overlap_s: float,
    ) -> None:
        """`has_no_minimum(tenant)`: whether it is suspended or has spent its budget, so that its minimums don't hold.

        What may be on a pod of one of `pools` has no Service of its own. For `overlap_s` what a version can't take
        that was only just named and ready goes to the one before it.
        """
        self._api = api
        self._models = models
        self._feed = feed
        self._outcomes = outcomes
        self._pods = pods
        self._renderer = renderer
        self._clock = clock
        self._has_no_minimum = has_no_minimum
        self._minimums = Minimums(models.every_model, pods, feed)
        self._pools = pools
        self._overlap_s = overlap_s
        self._version_status = VersionStatusPublisher(api, feed, outcomes, pods, renderer.cluster, clock)
        self._changed = asyncio.Event()  # what is wanted may be otherwise
        self._rollout_changed = asyncio.Event()  # a roll-out may go on
        self._namespaces = TenantNamespaces(api, NamespaceRequirements.of(renderer.cluster), clock, self._changed.set)
        self.node_forecasts = self._version_status.node_forecasts
        self.synced = asyncio.Event()  # all that there is was seen once
        self._published_failures: dict[VersionKey, Failure] = {}  # the published reasons why versions can't be rendered
        self._published_refusals: set[VersionKey] = set()  # versions whose refused Service was published
        self._revisions, self._slices = UidTracker(), UidTracker()  # that were seen, also by a run before
        self._begin()

    def __repr__(self) -> str:
        return f"<KnativeController {self._version_status!r} {self._pods!r} {self._converger!r}>"

    def _begin(self) -> None:
        """Forget what was wanted. What was seen stays told until all is seen again, start problems until they end."""
        self.synced.clear()
        self._pools.begin()
        self._converger = Applier(
            self._api, SERVICE_API, "Service", self._clock, self._renderer.own, on_changed=self._service_changed
        )
        self._rollout = Rollout(
            self._converger.seen, self._version_status.failure_of, self._pods, self._clock, self._renderer.own,
            self._renderer.cluster.features,
        )  # fmt: skip
        self._outcomes.behind = {}
        self._overlap = False  # an old version of some model still serves: it leaves after a time, or with its last pod
        self._takeover = Takeover(self._feed.reader_names)
        self._without_minimum: frozenset[str] = frozenset()  # tenants whose minimums did not hold at the last look
        self._render_failures: dict[VersionKey, Failure] = {}  # at the last look at all versions
        self._refused_since_s: dict[VersionKey, float] = {}
        self._changed.set()

    def refusals(self) -> Counter[str]:
        """How many objects are not as they should be, by why, in one word."""
        return Counter(each.reason for each in self._converger.refusals().values())

    # -- as the decider --

    def observe(self, stats: Stats) -> None:
        """Activators report to Knative's autoscaler; what one says here is of versions that share pods."""
        self._pools.observe(stats)

    def tick(self) -> None:
        """What is wanted may be otherwise: look, soon."""
        self._changed.set()
        self._pools.tick()

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """Their tenant is suspended, or they are deleted: what is wanted says so by now."""
        self._pools.stop(keys)
        self.tick()

    def meanwhile(self, model: Model) -> dict[str, str]:
        """Of versions that were only just named those before them, by when their Services came to be ready."""
        live_versions = [version.key for version in model.live_versions]
        named = [key for key in live_versions if key.version in model.named]
        if not recently_ready_versions(model.named, self._ready_since(named), self._now_s(), self._overlap_s):
            return {}  # as most of the time, whatever other versions there are
        return previous_versions(model.named, self._ready_since(live_versions), self._now_s(), self._overlap_s)

    def _ready_since(self, keys: Iterable[VersionKey]) -> dict[str, float]:
        every = ((key.version, self._ready_since_s(key)) for key in keys)
        return {version: since_s for version, since_s in every if since_s is not None}

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raises Refused(InvalidRequest) where a cluster can't scale the model so."""
        self._renderer.check(model, scale)
        self._minimums.check(model, scale)
        self._pools.check_scale(model, scale)

    # -- loops --

    async def run(self) -> None:
        """Run until cancelled. Raises what a watch of the cluster raises; a second run begins with what there is then.

        Work that only acts on what is seen runs in loops of its own, so that its errors end no watch.
        """
        self._begin()
        revisions, slices = asyncio.Event(), asyncio.Event()
        async with Loops() as loops, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._converger.run(), name="converge")
            tasks.create_task(
                follow(
                    self._api,
                    SERVICE_API,
                    "Revision",
                    OURS_SELECTOR,
                    self._version_status.revision,
                    revisions,
                    self._revisions,
                )
            )
            tasks.create_task(
                follow(self._api, SLICE_API, "EndpointSlice", PRIVATE_SLICES, self._slice, slices, self._slices)
            )
            loops.start("node waits", self.node_forecasts.run)
            loops.start("tenant spaces", self._namespaces.run)
            for first in (self._converger.synced, revisions, slices):
                await first.wait()
            for ref in [Ref(SERVICE_API, "Service", *place) for place in self._version_status.places()]:
                if self._converger.seen(ref) is None:
                    self._service_changed(ref)  # it went while nobody watched
            await self._pools.adopt()
            self._takeover.begin(self._now_s())
            self._models.republish_meanwhile()
            self.synced.set()
            loops.start("pools", self._pools.run)
            loops.start("wanted objects", self._apply_wanted)
            loops.start("roll-out", self._roll_out)
            loops.start("refusals", self._publish_refusals)

    async def _apply_wanted(self) -> None:
        """Once all was seen: which of the old are kept depends on what there is."""
        self._changed.set()  # after an error the loop starts again, with all work left to do
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._models.republish_meanwhile()
            models = self._models.every_model()
            self._overlap = any(
                model.meanwhile or (len(model.versions) > 1 and not self._is_takeover_over(model)) for model in models
            )
            every = versions_with_service(
                models, self._has_service, self._is_ready, self._has_ready_pod, self._is_takeover_over
            )
            own, lacking = self._select_placeable(
                each for each in every if not self._pools.pooled_models.is_pooled(*each)
            )
            objects, failed = self._renderer.objects(own, self._has_no_minimum)
            failed |= lacking
            # Before anything that may fail: `_roll_out` goes on with what is rendered here, and must know what is not.
            self._render_failures = failed
            self._rollout.render(objects, self._renderer.places)
            self._choose_rollout()
            self._converger.want(self._wanted_services())
            for key, failure in failed.items():
                if self._published_failures.get(key) != failure:
                    self._version_status.fail(key, failure)
            for key in self._published_failures.keys() - failed.keys():
                self._outcomes.clear_problem(key, problem_from_failure(self._published_failures[key]).reason)
            self._published_failures = failed

    async def _roll_out(self) -> None:
        """Go on with the roll-out after a Service, a pod or the time has changed. It renders nothing again."""
        while True:
            await self._rollout_changed.wait()
            self._rollout_changed.clear()
            if self._choose_rollout():
                self._converger.want(self._wanted_services())

    def _choose_rollout(self) -> bool:
        """Choose again whose turn it is in the roll-out. Return whether another Service may be wanted."""
        is_changed = self._rollout.choose(self._converger.refusals())
        self._outcomes.behind = self._rollout.behind
        return is_changed

    def _wanted_services(self) -> Iterator[Json]:
        """Yield all Services that the cluster is to have."""
        yield from self._rollout.chosen.values()
        # A version that can't be rendered keeps its Service as it is, so that it goes on serving.
        for key in self._render_failures:
            if self._has_service(key):
                ref = Ref(SERVICE_API, "Service", *namespaced_service_name(key, self._renderer.cluster))
                seen = self._converger.seen(ref)
                if ref not in self._rollout.chosen and seen is not None:
                    yield unchanged_service(seen)
        yield from filter(self._is_placed, self._pools.objects())

    def _select_placeable(
        self, every: Iterable[tuple[Model, ModelVersion]]
    ) -> tuple[list[tuple[Model, ModelVersion]], dict[VersionKey, Failure]]:
        """Return the versions whose Service exists or may be created, and for others why they have to wait.

        An existing Service stays wanted even if its namespace has lost something that new Services need.
        """
        placed, lacking, namespaces = [], dict[VersionKey, Failure](), set[str]()
        for model, version in every:
            key = version.key
            try:
                namespace, name = namespaced_service_name(key, self._renderer.cluster)
            except Refused:
                namespace = self._renderer.own
            if namespace == self._renderer.own:
                placed.append((model, version))  # rendering refuses it with the reason
                continue
            namespaces.add(namespace)
            is_complete = self._namespaces.is_complete(namespace, key.tenant)
            if is_complete or self._converger.seen(Ref(SERVICE_API, "Service", namespace, name)) is not None:
                placed.append((model, version))
            elif (failure := self._namespaces.failure(namespace, key.tenant)) is not None:
                lacking[key] = failure
        self._namespaces.retain(namespaces | {namespace for namespace, _ in self._pools.places()})
        return placed, lacking

    def _is_placed(self, obj: Json) -> bool:
        """Return whether a pool's Service exists or may be created."""
        ref = Ref.of(obj)
        return self._namespaces.is_complete(ref.namespace or "", "") or self._converger.seen(ref) is not None

    async def find_start_obstacle(self, tenant: str) -> StartProblem | None:
        """Return what the tenant's namespace lacks to start versions; None if nothing, or unknown in time."""
        with suppress(Refused):
            namespace = namespace_of(tenant, self._renderer.cluster)
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_WAIT_S):
                    await self._namespaces.wait_until_known(namespace, tenant)
            found = self._namespaces.failure(namespace, tenant)
            return None if found is None else problem_from_failure(found)
        return None

    async def _publish_refusals(self) -> None:
        for beat in count():
            await self._clock.sleep(REFUSAL_POLL_S)
            is_roll_out_due = self._rollout.is_moving or (self._rollout.behind and beat % ROLLOUT_STALL_POLLS == 0)
            without_minimum = frozenset(
                model.tenant
                for model in self._models.every_model()
                if model.scale.min and self._has_no_minimum(model.tenant)
            )
            if self._overlap or without_minimum != self._without_minimum:
                self._without_minimum = without_minimum
                self._changed.set()
            if is_roll_out_due:
                self._rollout_changed.set()
            refused = self._find_refused()
            for key in sorted(refused - self._published_refusals):
                self._version_status.fail(key, StartFailed("the cluster does not take its Service", "refused_object"))
            for key in sorted(self._published_refusals - refused):
                self._outcomes.clear_problem(key, "refused_object")
            self._published_refusals = refused

    def _find_refused(self) -> set[VersionKey]:
        """Return the versions that have no Service because the cluster refuses it.

        A transient refusal counts only after TRANSIENT_S.
        """
        now_s, why = self._now_s(), dict[VersionKey, str]()
        for ref, refusal in self._converger.refusals().items():
            if (key := self._renderer.places.get(ref.place)) is not None and self._find_own(ref) is None:
                why[key] = refusal.reason
        self._refused_since_s = {key: self._refused_since_s.get(key, now_s) for key in why}
        return {
            key
            for key, reason in why.items()
            if reason not in TRANSIENT or now_s - self._refused_since_s[key] >= TRANSIENT_S
        }

    # -- what is seen --

    def _service_changed(self, ref: Ref) -> None:
        place, obj = ref.place, self._find_own(ref)
        if self._pools.service(place, obj):
            return
        before, found = self._version_status.service(place, obj, is_new=self.synced.is_set())
        if (before is None) != (found is None) or (before and found and bool(before.ready) != bool(found.ready)):
            self._changed.set()  # an old version may go now
        elif before and found and before.ready != found.ready:
            self._rollout_changed.set()

    def _slice(self, place: NamespacedName, obj: Json | None) -> None:
        found = None if obj is None else parse_slice_pods(obj)
        self._pools.slice(place, found)
        self._version_status.slice(place, found)

    def _find_own(self, ref: Ref) -> Json | None:
        """The object, unless it is another installation's."""
        obj = self._converger.seen(ref)
        return obj if obj is None or owner_of(obj) in (None, self._renderer.own) else None

    def _has_service(self, key: VersionKey) -> bool:
        return self._version_status.find(key) is not None

    def _is_ready(self, key: VersionKey) -> bool:
        return self._ready_since_s(key) is not None

    def _ready_since_s(self, key: VersionKey) -> float | None:
        """None for one that never was. What may be on a pod that waits always was."""
        return -inf if self._pools.pooled_models.find(key) is not None else self._version_status.ready_since_s(key)

    def _is_takeover_over(self, model: Model) -> bool:
        return self._takeover.is_window_over(model, self._now_s())

    def _has_ready_pod(self, key: VersionKey) -> bool:
        return self._pods.ready(key) > 0

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / 1e6
