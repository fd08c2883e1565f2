"""Versions on a cluster: has a Knative Service written for each that may be served, and watches what becomes of them.

Knative decides how many pods each has. What is wanted follows from the registry and from what is there, and what
activators are told from what is seen (`seen_versions.py`). So this may be cancelled anywhere: the next leader goes on.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from typing import Final

from contracts.control import StartProblem, Stats
from contracts.errors import Failure, Refused
from contracts.traffic_errors import StartFailed
from controlplane.clock import Clock
from controlplane.facts import Model, VersionKey
from controlplane.facts import Version as ModelVersion
from controlplane.feed import FeedHub
from controlplane.minimums import Minimums
from controlplane.outcomes import Outcomes
from controlplane.policy.convergence import owner_of
from controlplane.policy.knative_seen import PRIVATE, pods_of
from controlplane.policy.knative_service import namespace_of
from controlplane.policy.labels import OURS_SELECTOR, Place
from controlplane.policy.replacement import versions_before, young_versions
from controlplane.policy.scale_settings import ScaleSettings
from controlplane.policy.start_problem import problem_of
from controlplane.policy.tenant_space import Needs
from controlplane.registry import Registry
from controlplane.scaling.knative.cluster import Busy, ClusterApi, Conflict, Json, Ref, Unreachable
from controlplane.scaling.knative.converge import Converger
from controlplane.scaling.knative.pods import PodTable
from controlplane.scaling.knative.pools import Pools
from controlplane.scaling.knative.rollout import Rollout, as_it_is
from controlplane.scaling.knative.seen_versions import SeenVersions
from controlplane.scaling.knative.tenant_spaces import TenantSpaces
from controlplane.scaling.knative.view import Uids, follow
from controlplane.scaling.knative.wanted import Rendering, place_of, served
from controlplane.takeover import Takeover
from service.loops import Loops

SERVING: Final = "serving.knative.dev/v1"
SLICES: Final = "discovery.k8s.io/v1"
NAMESPACE_WAIT_S: Final = 2.0  # at most, until a namespace that nobody asked about before was looked at
LOOK_S: Final = 2.0  # between two looks at what the cluster refuses
TRANSIENT: Final = {each.reason for each in (Busy, Conflict, Unreachable)}  # reasons of refusals
TRANSIENT_S: Final = 30.0  # a transient refusal that lasts longer fails the waiting requests
STALLED_BEATS: Final = 15  # of LOOK_S between two looks at a roll-out in which no turn comes


class Plane:
    """One per installation: of whoever leads. Also the decider that the routes ask, for whom Knative decides."""

    def __init__(
        self,
        api: ClusterApi,
        models: Registry,
        feed: FeedHub,
        outcomes: Outcomes,
        pods: PodTable,
        rendering: Rendering,
        clock: Clock,
        has_no_minimum: Callable[[str], bool],
        pools: Pools,
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
        self._rendering = rendering
        self._clock = clock
        self._has_no_minimum = has_no_minimum
        self._minimums = Minimums(models.every_model, pods, feed)
        self._pools = pools
        self._overlap_s = overlap_s
        self._seen = SeenVersions(api, feed, outcomes, pods, rendering.cluster, clock)
        self._changed = asyncio.Event()  # what is wanted may be otherwise
        self._progressed = asyncio.Event()  # a roll-out may go on
        self._spaces = TenantSpaces(api, Needs.of(rendering.cluster), clock, self._changed.set)
        self.nodes = self._seen.nodes
        self.synced = asyncio.Event()  # all that there is was seen once
        self._told: dict[VersionKey, Failure] = {}  # the published reasons why versions can't be rendered
        self._refused: set[VersionKey] = set()  # versions whose refused Service was published
        self._revisions, self._slices = Uids(), Uids()  # that were seen, also by a run before
        self._begin()

    def __repr__(self) -> str:
        return f"<Plane {self._seen!r} {self._pods!r} {self._converger!r}>"

    def _begin(self) -> None:
        """Forget what was wanted. What was seen stays told until all is seen again, start problems until they end."""
        self.synced.clear()
        self._pools.begin()
        self._converger = Converger(
            self._api, SERVING, "Service", self._clock, self._rendering.own, told=self._service_changed
        )
        self._rollout = Rollout(
            self._converger.seen, self._seen.failure_of, self._pods, self._clock, self._rendering.own,
            self._rendering.cluster.features,
        )  # fmt: skip
        self._outcomes.behind = {}
        self._overlap = False  # an old version of some model still serves: it leaves after a time, or with its last pod
        self._takeover = Takeover(self._feed.reader_names)
        self._without_minimum: frozenset[str] = frozenset()  # tenants whose minimums did not hold at the last look
        self._unrendered: dict[VersionKey, Failure] = {}  # at the last look at all versions
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
        alive = [version.key for version in model.alive]
        named = [key for key in alive if key.version in model.named]
        if not young_versions(model.named, self._since(named), self._now_s(), self._overlap_s):
            return {}  # as most of the time, whatever other versions there are
        return versions_before(model.named, self._since(alive), self._now_s(), self._overlap_s)

    def _since(self, keys: Iterable[VersionKey]) -> dict[str, float]:
        every = ((key.version, self._ready_since_s(key)) for key in keys)
        return {version: since_s for version, since_s in every if since_s is not None}

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raises Refused(InvalidRequest) where a cluster can't scale the model so."""
        self._rendering.check(model, scale)
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
                follow(self._api, SERVING, "Revision", OURS_SELECTOR, self._seen.revision, revisions, self._revisions)
            )
            tasks.create_task(follow(self._api, SLICES, "EndpointSlice", PRIVATE, self._slice, slices, self._slices))
            loops.start("node waits", self.nodes.run)
            loops.start("tenant spaces", self._spaces.run)
            for first in (self._converger.synced, revisions, slices):
                await first.wait()
            for ref in [Ref(SERVING, "Service", *place) for place in self._seen.places()]:
                if self._converger.seen(ref) is None:
                    self._service_changed(ref)  # it went while nobody watched
            await self._pools.adopt()
            self._takeover.begin(self._now_s())
            self._models.look_again()
            self.synced.set()
            loops.start("pools", self._pools.run)
            loops.start("wanted objects", self._want)
            loops.start("roll-out", self._roll_out)
            loops.start("refusals", self._look)

    async def _want(self) -> None:
        """Once all was seen: which of the old are kept depends on what there is."""
        self._changed.set()  # after an error the loop starts again, with all work left to do
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._models.look_again()
            models = self._models.every_model()
            self._overlap = any(
                model.meanwhile or (len(model.versions) > 1 and not self._is_settled_in(model)) for model in models
            )
            every = served(models, self._is_there, self._is_ready, self._is_awake, self._is_settled_in)
            own, lacking = self._placed(each for each in every if not self._pools.shared.takes(*each))
            objects, failed = self._rendering.objects(own, self._has_no_minimum)
            failed |= lacking
            # Before anything that may fail: `_roll_out` goes on with what is rendered here, and must know what is not.
            self._unrendered = failed
            self._rollout.render(objects, self._rendering.places)
            self._choose()
            self._converger.want(self._wanted())
            for key, failure in failed.items():
                if self._told.get(key) != failure:
                    self._seen.fail(key, failure)
            for key in self._told.keys() - failed.keys():
                self._outcomes.clear_problem(key, problem_of(self._told[key]).reason)
            self._told = failed

    async def _roll_out(self) -> None:
        """Go on with the roll-out after a Service, a pod or the time has changed. It renders nothing again."""
        while True:
            await self._progressed.wait()
            self._progressed.clear()
            if self._choose():
                self._converger.want(self._wanted())

    def _choose(self) -> bool:
        """Choose again whose turn it is in the roll-out. Return whether another Service may be wanted."""
        is_changed = self._rollout.choose(self._converger.refusals())
        self._outcomes.behind = self._rollout.behind
        return is_changed

    def _wanted(self) -> Iterator[Json]:
        """Yield all Services that the cluster is to have."""
        yield from self._rollout.chosen.values()
        # A version that can't be rendered keeps its Service as it is, so that it goes on serving.
        for key in self._unrendered:
            if self._is_there(key):
                ref = Ref(SERVING, "Service", *place_of(key, self._rendering.cluster))
                seen = self._converger.seen(ref)
                if ref not in self._rollout.chosen and seen is not None:
                    yield as_it_is(seen)
        yield from filter(self._is_placed, self._pools.objects())

    def _placed(
        self, every: Iterable[tuple[Model, ModelVersion]]
    ) -> tuple[list[tuple[Model, ModelVersion]], dict[VersionKey, Failure]]:
        """Return the versions whose Service exists or may be created, and for others why they have to wait.

        An existing Service stays wanted even if its namespace has lost something that new Services need.
        """
        placed, lacking, namespaces = [], dict[VersionKey, Failure](), set[str]()
        for model, version in every:
            key = version.key
            try:
                namespace, name = place_of(key, self._rendering.cluster)
            except Refused:
                namespace = self._rendering.own
            if namespace == self._rendering.own:
                placed.append((model, version))  # rendering refuses it with the reason
                continue
            namespaces.add(namespace)
            is_complete = self._spaces.is_complete(namespace, key.tenant)
            if is_complete or self._converger.seen(Ref(SERVING, "Service", namespace, name)) is not None:
                placed.append((model, version))
            elif (failure := self._spaces.failure(namespace, key.tenant)) is not None:
                lacking[key] = failure
        self._spaces.retain(namespaces | {namespace for namespace, _ in self._pools.places()})
        return placed, lacking

    def _is_placed(self, obj: Json) -> bool:
        """Return whether a pool's Service exists or may be created."""
        ref = Ref.of(obj)
        return self._spaces.is_complete(ref.namespace or "", "") or self._converger.seen(ref) is not None

    async def obstacle(self, tenant: str) -> StartProblem | None:
        """Return what the tenant's namespace lacks to start versions; None if nothing, or unknown in time."""
        with suppress(Refused):
            namespace = namespace_of(tenant, self._rendering.cluster)
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_WAIT_S):
                    await self._spaces.wait_until_known(namespace, tenant)
            found = self._spaces.failure(namespace, tenant)
            return None if found is None else problem_of(found)
        return None

    async def _look(self) -> None:
        for beat in count():
            await self._clock.sleep(LOOK_S)
            is_roll_out_due = self._rollout.is_moving or (self._rollout.behind and beat % STALLED_BEATS == 0)
            without_minimum = frozenset(
                model.tenant
                for model in self._models.every_model()
                if model.scale.min and self._has_no_minimum(model.tenant)
            )
            if self._overlap or without_minimum != self._without_minimum:
                self._without_minimum = without_minimum
                self._changed.set()
            if is_roll_out_due:
                self._progressed.set()
            refused = self._refused_now()
            for key in sorted(refused - self._refused):
                self._seen.fail(key, StartFailed("the cluster does not take its Service", "refused_object"))
            for key in sorted(self._refused - refused):
                self._outcomes.clear_problem(key, "refused_object")
            self._refused = refused

    def _refused_now(self) -> set[VersionKey]:
        """Return the versions that have no Service because the cluster refuses it.

        A transient refusal counts only after TRANSIENT_S.
        """
        now_s, why = self._now_s(), dict[VersionKey, str]()
        for ref, refusal in self._converger.refusals().items():
            if (key := self._rendering.places.get(ref.place)) is not None and self._own(ref) is None:
                why[key] = refusal.reason
        self._refused_since_s = {key: self._refused_since_s.get(key, now_s) for key in why}
        return {
            key
            for key, reason in why.items()
            if reason not in TRANSIENT or now_s - self._refused_since_s[key] >= TRANSIENT_S
        }

    # -- what is seen --

    def _service_changed(self, ref: Ref) -> None:
        place, obj = ref.place, self._own(ref)
        if self._pools.service(place, obj):
            return
        before, found = self._seen.service(place, obj, is_new=self.synced.is_set())
        if (before is None) != (found is None) or (before and found and bool(before.ready) != bool(found.ready)):
            self._changed.set()  # an old version may go now
        elif before and found and before.ready != found.ready:
            self._progressed.set()

    def _slice(self, place: Place, obj: Json | None) -> None:
        found = None if obj is None else pods_of(obj)
        self._pools.slice(place, found)
        self._seen.slice(place, found)

    def _own(self, ref: Ref) -> Json | None:
        """The object, unless it is another installation's."""
        obj = self._converger.seen(ref)
        return obj if obj is None or owner_of(obj) in (None, self._rendering.own) else None

    def _is_there(self, key: VersionKey) -> bool:
        return self._seen.find(key) is not None

    def _is_ready(self, key: VersionKey) -> bool:
        return self._ready_since_s(key) is not None

    def _ready_since_s(self, key: VersionKey) -> float | None:
        """None for one that never was. What may be on a pod that waits always was."""
        return -inf if self._pools.shared.find(key) is not None else self._seen.ready_since_s(key)

    def _is_settled_in(self, model: Model) -> bool:
        return self._takeover.is_window_over(model, self._now_s())

    def _is_awake(self, key: VersionKey) -> bool:
        return self._pods.ready(key) > 0

    def _now_s(self) -> float:
        return self._clock.monotonic_us() / 1e6
