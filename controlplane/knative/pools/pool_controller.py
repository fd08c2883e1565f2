"""Control pooled pods on a cluster: write their Services, find and probe the pods, and scale the versions on them.

An `Autoscaler`, the same as on one machine, scales the versions. Knative decides how many pods there are, from the
concurrency that activators report for us (`pod_placement.pool_concurrency`).
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from msgspec import structs

from controlplane.knative.apply.cluster import ClusterError, Json
from controlplane.knative.policy.knative_service import ClusterSpec
from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.knative.policy.object_status import SlicePods
from controlplane.knative.policy.pod_placement import PoolingRule, PoolSpec, pool_concurrency, pool_for
from controlplane.knative.policy.pool_service import (
    BOUND_DELETION_COST,
    DELETION_COST,
    LISTEN_PORT,
    device_class_of,
    pool_service_name,
    render_pool_service,
)
from controlplane.knative.pools.pod_client import PodClient
from controlplane.knative.pools.pool_actuator import PoolActuator
from controlplane.knative.pools.pool_pods import PodState, PoolPod, PoolPods
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.kpa.autoscaler import Autoscaler, VersionLookup
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.policy.start_problem import problem_from_failure
from controlplane.tasks import Tasks
from kelvin.contracts.artifacts.runtime_control import BindPodRequest
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed, PoolRow, Stats
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.process.loops import Loops

log = logging.getLogger(__name__)

TICK_INTERVAL_S: Final = 1.0
IDLE_PROBE_TICKS: Final = 5  # between two probes of a pod in a settled state
MAX_CONCURRENT_PROBES: Final = 16  # pods that are probed at once
ADOPTION_S: Final = 8.0  # longest time to find running replicas before activators get their feed
NO_POD: Final = problem_from_failure(StartFailed("it waits for a free pod", "no_room"))
_KNOWN: Final = (PodState.PARKED, PodState.BOUND)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Pools, the models that use them, and the port on which pods take orders."""

    pools: tuple[PoolSpec, ...] = ()
    pooling_rule: PoolingRule = field(default_factory=PoolingRule)
    port: int = LISTEN_PORT


class PooledModels:
    """The models whose versions are on pooled pods, as the autoscaler reads them."""

    def __init__(self, models: VersionLookup, settings: PoolSettings) -> None:
        self._models = models
        self._settings = settings

    def find(self, key: VersionKey) -> tuple[Model, Version] | None:
        """Return None also for a version with a Service of its own. `idle` is always zero, whatever is stored."""
        found = self._models.find(key)
        if found is None or found[1].is_deleted or not self.is_pooled(*found):
            return None
        model, version = found
        return replace(model, scale=structs.replace(model.scale, idle="zero")), version

    def all_models(self) -> tuple[Model, ...]:
        """Return the models that share pods, including those without a version that fits one."""
        is_pooled = self._settings.pooling_rule.is_pooled
        return tuple(model for model in self._models.all_models() if is_pooled(model.tenant, model.model))

    async def resume(self, key: VersionKey, stopped_at_s: int) -> None:
        """Record that a version that was stopped at `stopped_at_s` is requested again. Raises Refused."""
        await self._models.resume(key, stopped_at_s)

    def is_pooled(self, model: Model, version: Version) -> bool:
        """Return whether the version runs on pooled pods: its model is pooled, and its weights fit some pool."""
        if not self._settings.pooling_rule.is_pooled(model.tenant, model.model):
            return False
        return pool_for(version.registration.total_bytes, self._settings.pools) is not None


class PoolController:
    """Controls the pools, in the process that leads. Without pools it has no pods and no versions."""

    def __init__(
        self,
        context: ControllerContext,
        settings: PoolSettings,
        cluster: ClusterSpec,
        kv_bytes: int,
        pod_client: PodClient,
        tasks: Tasks,
    ) -> None:
        self._api, self._clock = context.api, context.clock
        self._settings = settings
        self._cluster = cluster
        self._pod_client = pod_client
        self._feed, self._outcomes = context.feed, context.outcomes
        self._explained: set[VersionKey] = set()  # versions that are recorded as waiting for a pod
        self._specs = {pool_service_name(each, cluster): each for each in settings.pools}
        self._services = [render_pool_service(each, cluster, kv_bytes) for each in settings.pools]
        self._revisions: dict[NamespacedName, str] = {}
        self._slices: dict[NamespacedName, tuple[NamespacedName, SlicePods]] = {}
        self._knows_slices = False  # all slices were seen
        self._rows: tuple[PoolRow, ...] = ()
        self._probe_permits = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self.pooled_models = PooledModels(context.registry, settings)
        self.pods = PoolPods()
        self._tasks = tasks
        maximum = sum(each.maximum for each in settings.pools)
        self._actuator = PoolActuator(maximum, self.pods, pod_client, self._build_bind_request, context, tasks)
        # No warmth levels: on a cluster the last replica goes to zero, or stays.
        self._autoscaler = Autoscaler(self.pooled_models, self._actuator, self._clock, tasks, lambda *_: (), self._feed)
        self._autoscaler.on_slot_shortage_changed = partial(self._outcomes.set_slot_shortage, NO_POD)
        self._actuator.add_listener(self._autoscaler)
        self._actuator.add_listener(self._outcomes)

    def __repr__(self) -> str:
        return f"<PoolController {len(self._specs)} {self._actuator!r}>"

    # -- wanted and observed objects, for `KnativeController` --

    def reset_view(self) -> None:
        """Prepare for a new view of all objects. Published facts stay until then."""
        self._slices.clear()
        self._knows_slices = False

    def services(self) -> list[Json]:
        """Return the pools' Services. An operator creates their namespace."""
        return self._services

    def service_names(self) -> Iterable[NamespacedName]:
        """Return where the pools' Services are."""
        return self._specs.keys()

    def on_service(self, object_name: NamespacedName, obj: Json | None) -> bool:
        """Process a Knative Service. Return whether it belongs to a pool."""
        if object_name not in self._specs:
            return False
        status = {} if obj is None else obj.get("status") or {}
        revision = status.get("latestReadyRevisionName") or status.get("latestCreatedRevisionName") or ""
        if revision:
            self._revisions[object_name] = revision
        else:
            self._revisions.pop(object_name, None)
        return True

    def on_slice(self, object_name: NamespacedName, slice_pods: SlicePods | None) -> None:
        """Process an EndpointSlice; None if it is gone. Slices of other Services are ignored."""
        before = self._slices.pop(object_name, None)
        owner = (object_name[0], slice_pods.service) if slice_pods is not None else None
        if slice_pods is not None and owner in self._specs:
            self._slices[object_name] = owner, slice_pods
        if not self._knows_slices:
            return  # a slice that was not seen yet may have more pods
        for slice_owner in {each for each in (owner, before and before[0]) if each is not None and each in self._specs}:
            self._update_pods(slice_owner)

    def _update_pods(self, owner: NamespacedName) -> None:
        spec, namespace = self._specs[owner], owner[0]
        pods = [pod for slice_owner, found in self._slices.values() if slice_owner == owner for pod in found.pods]
        names_and_urls = {(pod.name, pod.url) for pod in pods}
        for each in self.pods:
            # After its node has rebooted, a pod keeps its name but has another address.
            if (each.namespace, each.pool) == (namespace, spec.name) and (each.name, each.url) not in names_and_urls:
                self._actuator.on_deleted(each)
        for pod in {pod.name: pod for pod in pods}.values():
            pooled_pod = self.pods.find((namespace, pod.name))
            if pooled_pod is None:
                control_url = f"https://{urlsplit(pod.url).netloc.rpartition(':')[0]}:{self._settings.port}"
                pooled_pod = PoolPod(
                    pod.name, namespace, spec.name, spec.weight_bytes, pod.url, control_url, self._clock.monotonic_us()
                )
                self.pods.add(pooled_pod)
            if pod.is_leaving:
                self._actuator.on_terminating(pooled_pod)

    def count_pods(self) -> dict[tuple[str, ...], float]:
        """Return the number of pods by pool and state, and the wanted number of each pool."""
        found: dict[tuple[str, ...], float] = {(name, "wanted"): count for name, count in self._wanted_pods().items()}
        for pod in self.pods:
            found[pod.pool, pod.state] = found.get((pod.pool, pod.state), 0) + 1
        return found

    # -- as `Scaler`, for pooled versions --

    def observe(self, stats: Stats) -> None:
        """Record an activator's reports. Versions with a Service of their own are ignored."""
        self._autoscaler.observe(stats)

    def tick(self) -> None:
        """Decide now, because models or tenants have changed."""
        self._autoscaler.tick()

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """End the replicas of these versions now. Versions with a Service of their own are skipped."""
        self._autoscaler.stop(
            tuple(key for key in keys if self._actuator.process_count(key) or self.pooled_models.find(key))
        )

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if pooled pods can't keep the minimum. Models without pools pass."""
        if any(self.pooled_models.is_pooled(model, each) for each in model.live_versions):
            self._autoscaler.check_scale(model, scale)

    def _build_bind_request(self, key: VersionKey) -> BindPodRequest | None:
        found = self.pooled_models.find(key)
        if found is None or self._feed.is_suspended(key.tenant):
            return None
        return BindPodRequest(
            tenant=key.tenant,
            model=key.model,
            version=key.version,
            device_class=device_class_of(self._cluster),
            store=self._cluster.store_url,
            weight_bytes=found[1].registration.total_bytes,
        )

    # -- loops --

    async def adopt(self) -> None:
        """Find and publish running replicas, for ADOPTION_S at most. Call it once all slices are known."""
        self._knows_slices = True
        for owner in self._specs:
            self._update_pods(owner)
        deadline_us = self._clock.monotonic_us() + int(ADOPTION_S * 1e6)
        probes = [asyncio.create_task(self._probe(pod), name=f"probe {pod.name}") for pod in self.pods]
        try:
            while self._clock.monotonic_us() < deadline_us and (
                not all(probe.done() for probe in probes) or any(pod.state is PodState.BINDING for pod in self.pods)
            ):
                await self._clock.sleep(0.05)
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def run(self) -> None:
        """Run until cancelled. Errors of one loop do not end the other."""
        async with Loops() as loops:
            loops.start("pool autoscaler", self._autoscaler.run)
            loops.start("pool pods", self._tick_forever)
            await loops.wait()

    async def _tick_forever(self) -> None:
        """Probe pods and publish, once a second. Probes run in the background, so a slow pod delays nothing."""
        tick = 0
        while True:
            probes_all = tick % IDLE_PROBE_TICKS == 0
            for pod in self.pods:
                if probes_all or pod.state not in _KNOWN or pod.written_deletion_cost != _deletion_cost(pod):
                    self._tasks.start(self._probe(pod), f"probe {pod.name}")
            self._actuator.assign_pods()
            self._explain()
            self._publish_pool_rows()
            await self._clock.sleep(TICK_INTERVAL_S)
            tick += 1

    async def _probe(self, pod: PoolPod) -> None:
        """Ask the pod for its state, and update its deletion cost. Does nothing while another probe of it runs."""
        if pod.is_probing:
            return
        pod.is_probing = True
        try:
            async with self._probe_permits:
                with suppress(Refused):  # it is between two lives, or not up yet
                    self._actuator.on_report(pod, await self._pod_client.read_state(pod.control_url))
                await self._write_deletion_cost(pod)
        finally:
            pod.is_probing = False

    async def _write_deletion_cost(self, pod: PoolPod) -> None:
        """Write a changed deletion cost: when a pool shrinks, pods without a version go first (KEP-2255)."""
        cost = _deletion_cost(pod)
        if pod.written_deletion_cost == cost or pod.is_ending:
            return
        metadata = {"name": pod.name, "namespace": pod.namespace, "annotations": {DELETION_COST: cost}}
        try:
            await self._api.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
        except ClusterError as error:
            pod.refusals += 1
            if should_log(pod.refusals):
                fields = {"pod": pod.name, "why": str(error), "failures": pod.refusals}
                log.warning("a pod's deletion cost can't be written", extra=fields)
        else:
            pod.written_deletion_cost, pod.refusals = cost, 0

    def _explain(self) -> None:
        """Record for each version without a pod that it waits for one."""
        waiting = {
            VersionKey(bind_request.tenant, bind_request.model, bind_request.version)
            for bind_request in self._actuator.waiting_requests()
        }
        waiting = {key for key in waiting if not self._actuator.started_count(key)}
        for key in sorted(waiting):
            self._outcomes.set_problem(key, NO_POD)
        for key in sorted(self._explained - waiting):
            self._outcomes.clear_problem(key, NO_POD.reason)
        self._explained = waiting

    def _publish_pool_rows(self) -> None:
        """Publish the wanted concurrency. Each activator reports its share to Knative's autoscaler."""
        counts = self._wanted_pods()
        readers = max(1, self._feed.readers)
        rows = tuple(
            PoolRow(namespace=object_name[0], name=revision, share=wanted / readers, wanted=wanted)
            for object_name, revision in sorted(self._revisions.items())
            for wanted in (counts[self._specs[object_name].name],)
        )
        if rows and rows != self._rows:
            self._rows = rows
            self._feed.publish(Feed(pools=rows))

    def _wanted_pods(self) -> dict[str, int]:
        waiting_starts: dict[str, int] = {}
        for bind_request in self._actuator.waiting_requests():
            if (spec := pool_for(bind_request.weight_bytes, self._settings.pools)) is not None:
                waiting_starts[spec.name] = waiting_starts.get(spec.name, 0) + 1
        return pool_concurrency(self._settings.pools, self.pods.count_taken(), waiting_starts)


def _deletion_cost(pod: PoolPod) -> str:
    """Return how much it costs to delete the pod: high if it has a version."""
    return "0" if pod.key is None else BOUND_DELETION_COST
