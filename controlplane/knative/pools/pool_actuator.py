"""Replicas of versions on pooled pods: the autoscaler's actuator for versions that fit a pool.

`apply` decides and changes state at once, and does the rest in the background. A pod's own report counts more than
remembered state. So a bind that was interrupted, or that another control plane began, is found and continued.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from controlplane.knative.policy.knative_service import NODE_S
from controlplane.knative.policy.pod_placement import choose_pod
from controlplane.knative.pools.pod_client import PodClient
from controlplane.knative.pools.pool_pods import PodState, PoolPod, PoolPods
from controlplane.knative.services.controller_context import ControllerContext
from controlplane.registry.feed_hub import DRAIN_DELIVERY_LIMIT_S
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, ReplicaListener
from controlplane.tasks import Tasks
from kelvin.contracts.artifacts.runtime_control import BindPodRequest, BindResponse, RuntimeReport, RuntimeState
from kelvin.contracts.errors import Failure, Internal, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow, RestoreFailure
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.traffic_errors import StartFailed
from kelvin.process.loops import notify

log = logging.getLogger(__name__)

POD_WAIT_S: Final = float(NODE_S)  # for a free pod: a node may have to come first
MAX_ATTEMPTS: Final = 3  # in a row, if the pod is lost during the bind
_HELD: Final = (PodState.BINDING, PodState.BOUND)


@dataclass(eq=False, slots=True)
class _Start:
    key: VersionKey
    bind_request: BindPodRequest
    deadline_us: int
    attempts: int = 0


class PoolActuator:
    """Binds versions to pooled pods and releases them. `slots` bounds the number of pods. `build_bind_request` returns
    None for a version that may not be on a pooled pod.
    """

    def __init__(
        self,
        slots: int,
        pods: PoolPods,
        pod_client: PodClient,
        build_bind_request: Callable[[VersionKey], BindPodRequest | None],
        context: ControllerContext,
        tasks: Tasks,
    ) -> None:
        self._slots = slots
        self._pods = pods
        self._pod_client = pod_client
        self._build_bind_request = build_bind_request
        self._feed, self._table, self._clock = context.feed, context.pods, context.clock
        self._tasks = tasks
        self._starts: list[_Start] = []
        self._listeners: list[ReplicaListener] = []

    def __repr__(self) -> str:
        return f"<PoolActuator starts={len(self._starts)} {self._pods.count_taken()}>"

    def add_listener(self, listener: ReplicaListener) -> None:
        """Call `listener` on replica state changes from now on."""
        self._listeners.append(listener)

    # -- as the autoscaler's actuator --

    @property
    def slots(self) -> int:
        """Return the number of pods that all pools together may have. The cluster may have room for fewer."""
        return self._slots

    def ready_count(self, key: VersionKey) -> int:
        return len(self._pods.pods_of(key, PodState.BOUND))

    def live_count(self, key: VersionKey) -> int:
        return len(self._pods.pods_of(key, *_HELD)) + len(self._starts_of(key))

    def started_count(self, key: VersionKey) -> int:
        return len(self._pods.pods_of(key, *_HELD))

    def process_count(self, key: VersionKey) -> int:
        return len(self._pods.pods_of(key, *PodState)) + len(self._starts_of(key))

    def active_versions(self) -> tuple[VersionKey, ...]:
        return tuple(sorted(self._pods.keys() | {start.key for start in self._starts}))

    def has_room(self) -> bool:
        """Return whether another pod is free or may be made. If the cluster can't make it, the start fails in time."""
        return sum(self._pods.count_taken().values()) + len(self._starts) < self._slots

    def leaving_count(self) -> int:
        return sum(pod.state is PodState.LEAVING and not pod.is_ending for pod in self._pods)

    def sleep(self, key: VersionKey, level: Level) -> None:
        """Do nothing: replicas never sleep on a cluster (`ServiceRenderer.check`)."""

    def apply(self, key: VersionKey, replicas: int, requested_us: int) -> None:
        """Scale the version to `replicas`. Idempotent. On return the order is accepted, not carried out."""
        live = self.live_count(key)
        for _ in range(replicas - live):
            if (bind_request := self._build_bind_request(key)) is None:
                break
            self._starts.append(self._start(key, bind_request))
        surplus = live - replicas
        for start in self._starts_of(key)[::-1][: max(0, surplus)]:
            self._starts.remove(start)
            surplus -= 1
        for pod in self._pods.pods_of(key, *_HELD)[::-1][: max(0, surplus)]:  # the youngest: others have warm caches
            self.release(pod)
        self.assign_pods()

    def _start(self, key: VersionKey, bind_request: BindPodRequest) -> _Start:
        return _Start(key, bind_request, self._now() + int(POD_WAIT_S * 1e6))

    def _starts_of(self, key: VersionKey) -> list[_Start]:
        return [start for start in self._starts if start.key == key]

    # -- starts --

    def waiting_requests(self) -> Collection[BindPodRequest]:
        """Return the bind requests of starts that have no pod yet."""
        return [start.bind_request for start in self._starts]

    def assign_pods(self) -> None:
        """Give free pods to starts, first come, first served. A start that has waited too long fails."""
        now_us = self._clock.monotonic_us()
        for start in tuple(self._starts):
            if (free_pod := choose_pod(start.bind_request.weight_bytes, self._pods.free_pods())) is not None:
                self._starts.remove(start)
                self._bind_to(self._pods.find_free(free_pod), start)
            elif now_us >= start.deadline_us:
                self._starts.remove(start)
                self._fail(start.key, StartFailed("no pod was free in time", "no_room"))

    def _bind_to(self, pod: PoolPod, start: _Start) -> None:
        """Mark the pod before anything else can run, then bind in the background."""
        pod.state, pod.key, pod.bind_request, pod.since_us = (
            PodState.BINDING,
            start.key,
            start.bind_request,
            self._now(),
        )
        log.info("a pod takes a version", extra={"version": str(start.key), "pod": pod.name})
        self._tasks.start(self._bind(pod, start), f"bind {start.key}")

    async def _bind(self, pod: PoolPod, start: _Start) -> None:
        try:
            bound = await self._pod_client.bind(pod.control_url, start.bind_request)
        except Refused as refused:
            self._handle_failed_bind(pod, start, refused.failure)
        except Exception:
            log.exception("a bind failed unexpectedly", extra={"version": str(start.key)})
            self._handle_failed_bind(pod, start, Internal())
        else:
            if pod.is_ending:
                self._handle_failed_bind(pod, start, Unavailable("the pod"))
            elif self._pods.contains(pod) and pod.state is PodState.BINDING and pod.key == start.key:
                self._serve(pod, start, bound)

    def _handle_failed_bind(self, pod: PoolPod, start: _Start, failure: Failure) -> None:
        was_ours = self._pods.contains(pod) and pod.state is PodState.BINDING and pod.key == start.key
        if was_ours:
            self._reset(pod)
        start.attempts += 1
        fields = {"version": str(start.key), "why": failure.message, "attempt": start.attempts}
        log.warning("a bind failed", extra=fields)
        was_lost = isinstance(failure, Unavailable) or failure.code == "conflict"
        if not was_ours:
            return  # it was released, or is gone: the autoscaler replaces it
        if was_lost and start.attempts < MAX_ATTEMPTS:
            self._starts.insert(0, start)
            self.assign_pods()
        else:
            self._fail(start.key, failure)

    def _serve(self, pod: PoolPod, start: _Start, bound: BindResponse) -> None:
        pod.state, pod.runtime_id, pod.max_streams = PodState.BOUND, bound.runtime_id, bound.max_streams
        self._publish(pod, bound.spans)
        (replica,) = [each for each in self._table.replicas_of(start.key) if each.runtime_id == pod.runtime_id]
        log.info("a replica is ready", extra={"version": str(pod.key), "runtime_id": pod.runtime_id, "pod": pod.name})
        notify(self._listeners, lambda listener: listener.on_replica_ready(replica))

    def _publish(self, pod: PoolPod, restore: tuple[StageSpan, ...] = ()) -> int:
        """Publish the replica to activators and the pod table. Return the feed revision."""
        assert pod.key is not None
        row = ReplicaRow(
            runtime_id=pod.runtime_id,
            tenant=pod.key.tenant,
            model=pod.key.model,
            version=pod.key.version,
            address="",
            max_streams=pod.max_streams,
            draining=pod.state is PodState.LEAVING,
            restore=restore,
            url=pod.url,
        )
        self._table.upsert(row)
        return self._feed.publish(Feed(replicas=(row,)))

    def _fail(self, key: VersionKey, failure: Failure) -> None:
        notify(self._listeners, lambda listener: listener.on_start_failed(key, failure))
        if self.live_count(key) == 0:  # last: a request that fails copies the start problem into its timeline
            self._feed.publish(Feed(failures=(RestoreFailure.from_failure(key.tenant, key.version, failure),)))

    # -- ends --

    def release(self, pod: PoolPod) -> None:
        """Release the pod in the background: it finishes its requests, and waits for another version."""
        was_bound, pod.state = pod.state is PodState.BOUND, PodState.LEAVING
        revision = self._publish(pod) if was_bound else 0
        self._tasks.start(self._release(pod, revision), f"release {pod.name}")

    async def _release(self, pod: PoolPod, revision: int) -> None:
        if revision and not await self._feed.wait_until_delivered(revision, DRAIN_DELIVERY_LIMIT_S):
            log.warning("an activator may not know of a drain", extra={"pod": pod.name})
        try:
            if pod.bind_request is not None:
                await self._pod_client.release(pod.control_url, pod.bind_request)
        except Refused as refused:  # the next probe of the pod releases it again
            log.warning("a pod was not released", extra={"pod": pod.name, "why": refused.failure.message})

    def on_terminating(self, pod: PoolPod) -> None:
        """Handle a pod that the cluster is ending. It drains by itself."""
        if pod.is_ending:
            return
        pod.is_ending = True
        if pod.state is PodState.BOUND:
            pod.state = PodState.LEAVING
            self._publish(pod)

    def on_deleted(self, pod: PoolPod) -> None:
        """Remove a pod that no longer exists."""
        self._pods.remove(pod)
        self._lose_replica(pod)

    def _lose_replica(self, pod: PoolPod) -> None:
        """Report that the pod's replica has ended, if it had one."""
        key, state_before, runtime_id = pod.key, pod.state, pod.runtime_id
        self._reset(pod)
        if key is None or not runtime_id:
            return
        self._feed.publish(Feed(removed_replicas=(runtime_id,)))
        self._table.remove(runtime_id)
        state = ReplicaState.READY if state_before is PodState.BOUND else ReplicaState.DRAINING
        replica = Replica(runtime_id, state, self._now(), key=key)
        notify(self._listeners, lambda listener: listener.on_replica_lost(replica))

    def _reset(self, pod: PoolPod) -> None:
        pod.state, pod.key, pod.bind_request, pod.runtime_id = PodState.UNKNOWN, None, None, ""
        pod.since_us = self._now()

    # -- reports of pods --

    def on_report(self, pod: PoolPod, report: RuntimeReport) -> None:
        """Process a pod's report. If the pod restarted, its old replica is lost. If it has a version that is unknown
        here, an earlier control plane bound it.
        """
        if not self._pods.contains(pod):
            return
        if pod.runtime_id and report.runtime_id != pod.runtime_id:
            self._lose_replica(pod)
        if pod.is_ending:
            return
        match report.state:
            case RuntimeState.STANDBY if pod.state in (PodState.UNKNOWN, PodState.LEAVING):
                if pod.state is PodState.LEAVING:
                    self._reset(pod)  # it was released before it had begun
                pod.state = PodState.PARKED
            case RuntimeState.RESTORING | RuntimeState.READY:
                self._adopt(pod, report)
            case _:
                pass
        self.assign_pods()

    def _adopt(self, pod: PoolPod, report: RuntimeReport) -> None:
        if report.tenant is None or report.model is None or report.version is None:
            return
        key = VersionKey(report.tenant, report.model, report.version)
        if pod.state is PodState.LEAVING:
            self._tasks.start(self._release(pod, 0), f"release {pod.name}")
        elif pod.state in (PodState.UNKNOWN, PodState.PARKED):
            if (bind_request := self._build_bind_request(key)) is not None:
                self._bind_to(pod, self._start(key, bind_request))  # the pod answers as before, or will
            else:
                unwanted = BindPodRequest(
                    tenant=key.tenant, model=key.model, version=key.version, device_class="", store="", weight_bytes=0
                )
                pod.state, pod.key, pod.bind_request = PodState.LEAVING, key, unwanted
                self._tasks.start(self._release(pod, 0), f"release {pod.name}")

    def _now(self) -> int:
        return self._clock.monotonic_us()
