"""Track replicas that wait for a node: their number by class of node, how long nodes took, and forecasts of their
starts.

Pure but for its own state. All times are the cluster's own, as its objects have them: seconds since 1970. See
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodStatus: `PodScheduled` is False with
reason `Unschedulable` while no node has room, and True from the moment when a node was chosen.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from controlplane.knative.policy.object_labels import CAPACITY, NamespacedName
from controlplane.knative.policy.object_status import (
    CRASH_LOOP,
    POD_PROBLEM_REASONS,
    UNSCHEDULABLE,
    Json,
    condition,
    exit_status_of,
    parse_time_s,
)
from controlplane.scaling.policy.eta import RunningMean

GUESS_S: Final = 180.0  # seconds until a node comes, before any was measured
START_GUESS_S: Final = 30.0  # seconds of a start on a new node (image and bytes), before any was measured
OVERDUE_RATIO: Final = 0.5  # remaining part of a wait that is already longer than earlier ones
MAX_CLASSES: Final = 256
MAX_STARTS: Final = 4096
ANY_ZONE: Final = "any"  # zone
CRASH_LOOP_RESTARTS: Final = 2  # restarts of a container that was never ready; one may be bad luck

_ZONE: Final = "topology.kubernetes.io/zone"
_DEVICES: Final = "nvidia.com/"
# Labels and taints of capacity that may be taken away: ours, Karpenter's, and those of three clouds.
_SPOT: Final = {
    CAPACITY: "spot",
    "karpenter.sh/capacity-type": "spot",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
}


@dataclass(frozen=True, slots=True, order=True)
class NodeClass:
    """The kind of node that a pod needs. `device` is `cpu`, `gpu` or a slice (`mig-1g.10gb`); `zone` is a zone or
    `any`. `spot` says whether it needs capacity that may be taken away (`only`), tolerates it (`may`), or not (`no`).
    """

    device: str
    zone: str
    spot: str


@dataclass(frozen=True, slots=True)
class PodProblem:
    """Why a pod does not become ready (one word of the cluster's), and its last exit status, if any."""

    reason: str
    exit_status: int | None = None


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod of a Knative Service. A time is None if that state was not reached."""

    service: str
    node: NodeClass
    unschedulable_since_s: float | None = None  # no node has room for it
    placed_s: float | None = None
    ready_s: float | None = None
    is_leaving: bool = False
    problem: PodProblem | None = None
    is_container_waiting: bool = False  # the kubelet has yet to start one of its containers
    has_become_unready: bool = False  # it was ready before, and is not now


@dataclass(frozen=True, slots=True)
class Pending:
    """Replicas of one class that wait for a node, the first of them since `since_s`. `node_s` is the mean length of a
    whole wait, from `measured` waits (0: a guess).
    """

    node: NodeClass
    replicas: int
    since_s: float | None
    node_s: float
    measured: int


@dataclass(slots=True)
class PodWaits:
    """All pods of versions, and measured waits for nodes. Memory is bounded."""

    _pods: dict[NamespacedName, ObservedPod] = field(default_factory=dict)
    _pods_by_service: dict[NamespacedName, dict[NamespacedName, None]] = field(default_factory=dict)  # pods by Service
    _waited: OrderedDict[NodeClass, RunningMean] = field(default_factory=OrderedDict)
    # By Service: seconds from a node until ready.
    _starts: OrderedDict[NamespacedName, RunningMean] = field(default_factory=OrderedDict)
    _start: RunningMean = field(default_factory=lambda: RunningMean(START_GUESS_S))  # of all Services

    def __repr__(self) -> str:
        return f"<PodWaits pods={len(self._pods)} pending={sum(row.replicas for row in self.pending())}>"

    def update_pod(self, object_name: NamespacedName, pod: ObservedPod | None) -> NamespacedName | None:
        """Store a pod's state; None if it is gone. Return its Service if the pod began or ended a wait for a node."""
        before = self._pods.pop(object_name, None)
        if before is not None:
            self._forget(object_name, before)
            if pod is not None and before.ready_s is not None:
                # Its start is over, even if it is not ready now.
                pod = replace(pod, ready_s=before.ready_s, has_become_unready=pod.ready_s is None)
        if pod is not None:
            self._pods[object_name] = pod
            self._pods_by_service.setdefault((object_name[0], pod.service), {})[object_name] = None
            self._learn(object_name, before, pod)
        was_waiting, is_waiting = (each is not None and _is_waiting(each) for each in (before, pod))
        if was_waiting == is_waiting:
            return None
        observed = pod or before
        assert observed is not None
        return object_name[0], observed.service

    def forget(self) -> None:
        """Forget all pods, but not the measured times."""
        self._pods.clear()
        self._pods_by_service.clear()

    def pending(self) -> tuple[Pending, ...]:
        """Return waiting replicas by class. A class with a recent wait has a row even without replicas."""
        since: dict[NodeClass, list[float]] = {node: [] for node in self._waited}
        for pod in self._pods.values():
            if _is_waiting(pod) and pod.unschedulable_since_s is not None:
                since.setdefault(pod.node, []).append(pod.unschedulable_since_s)
        return tuple(
            Pending(node, len(each), min(each, default=None), *self._node(node)) for node, each in sorted(since.items())
        )

    def services(self) -> Iterator[NamespacedName]:
        """Yield the Services that have a pod waiting for a node."""
        for service, object_names in self._pods_by_service.items():
            if any(_is_waiting(self._pods[object_name]) for object_name in object_names):
                yield service

    def service_of(self, object_name: NamespacedName) -> NamespacedName | None:
        """Return the Service of a pod; None if there is no such pod."""
        pod = self._pods.get(object_name)
        return None if pod is None else (object_name[0], pod.service)

    def services_with_problem(self) -> Iterator[NamespacedName]:
        """Yield the Services whose pods have a problem."""
        for service in self._pods_by_service:
            if self.problem(service) is not None:
                yield service

    def problem(self, service: NamespacedName) -> PodProblem | None:
        """Return why none of the Service's pods is ready; None if one is, or there is no problem."""
        pods = [self._pods[object_name] for object_name in self._pods_by_service.get(service, ())]
        if any(pod.ready_s is not None and not (pod.is_leaving or pod.has_become_unready) for pod in pods):
            return None
        if any(map(_is_waiting, pods)):
            return PodProblem(UNSCHEDULABLE)
        # Restarts of a pod that was ready may be long ago. They count only while the kubelet holds a container back.
        held = (pod for pod in pods if not pod.is_leaving and (pod.is_container_waiting or not pod.has_become_unready))
        return next((pod.problem for pod in held if pod.problem is not None), None)

    def forecast_ready_s(self, service: NamespacedName, now_s: float) -> float | None:
        """Return the seconds until the first of the Service's pods is ready: the wait for a node, and the start on it.
        None if a pod was ready already, or none is expected.
        """
        start_s = self._starts.get(service, self._start).value
        left = []
        for object_name in self._pods_by_service.get(service, ()):
            pod = self._pods[object_name]
            if pod.is_leaving:
                continue
            if pod.ready_s is not None:
                return None
            if pod.placed_s is not None:
                left.append(max(0.0, start_s - _since_s(pod.placed_s, now_s)))
            elif pod.unschedulable_since_s is not None:
                node_s, _ = self._node(pod.node)
                left.append(_remaining_s(node_s, _since_s(pod.unschedulable_since_s, now_s)) + start_s)
        return min(left, default=None)

    def check_integrity(self) -> None:
        """Assert that the index matches the pods, and that memory is bounded."""
        indexed = {
            (service, object_name)
            for service, object_names in self._pods_by_service.items()
            for object_name in object_names
        }
        assert indexed == {((object_name[0], pod.service), object_name) for object_name, pod in self._pods.items()}
        assert all(self._pods_by_service.values())
        assert len(self._waited) <= MAX_CLASSES
        assert len(self._starts) <= MAX_STARTS

    def _node(self, node: NodeClass) -> tuple[float, int]:
        """Return the mean length of a wait for such a node, and the number of samples."""
        mean = self._waited.get(node)
        return (GUESS_S, 0) if mean is None else (mean.value, mean.count)

    def _learn(self, object_name: NamespacedName, before: ObservedPod | None, now: ObservedPod) -> None:
        if before is None or now.placed_s is None:
            return
        if before.placed_s is None and before.unschedulable_since_s is not None:
            _add(self._waited, now.node, now.placed_s - before.unschedulable_since_s, MAX_CLASSES)
        if before.ready_s is None and now.ready_s is not None:
            start_s = now.ready_s - now.placed_s
            _add(self._starts, (object_name[0], now.service), start_s, MAX_STARTS)
            self._start = self._start.with_sample(max(0.0, start_s))

    def _forget(self, object_name: NamespacedName, pod: ObservedPod) -> None:
        service = object_name[0], pod.service
        del self._pods_by_service[service][object_name]
        if not self._pods_by_service[service]:
            del self._pods_by_service[service]


def parse_pod(obj: Json) -> ObservedPod | None:
    """Parse a Pod; None if it is no replica of a Service."""
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    service = (metadata.get("labels") or {}).get("serving.knative.dev/service")
    if not service:
        return None
    scheduled, ready = condition(obj, "PodScheduled"), condition(obj, "Ready")
    is_waiting = scheduled.get("status") == "False" and scheduled.get("reason") == UNSCHEDULABLE
    return ObservedPod(
        service,
        node_of(spec),
        unschedulable_since_s=_condition_time_s(scheduled, metadata) if is_waiting else None,
        placed_s=_condition_time_s(scheduled, metadata) if scheduled.get("status") == "True" else None,
        ready_s=_condition_time_s(ready, metadata) if ready.get("status") == "True" else None,
        is_leaving="deletionTimestamp" in metadata,
        problem=_parse_problem(obj),
        is_container_waiting=any((each.get("state") or {}).get("waiting") for each in _containers(obj)),
    )


def _containers(obj: Json) -> Iterable[Json]:
    return (obj.get("status") or {}).get("containerStatuses") or ()


def _parse_problem(obj: Json) -> PodProblem | None:
    """Return the first container's problem that keeps the pod from being ready (containerStatuses); None without."""
    for status in _containers(obj):
        reason = ((status.get("state") or {}).get("waiting") or {}).get("reason")
        ended = (status.get("lastState") or {}).get("terminated") or {}
        # A crash loop alternates between waiting and running: both states count.
        if reason == CRASH_LOOP or (
            ended and not status.get("ready") and status.get("restartCount", 0) >= CRASH_LOOP_RESTARTS
        ):
            code = ended.get("exitCode")
            return PodProblem(CRASH_LOOP, exit_status_of(code) if isinstance(code, int) else None)
        if reason in POD_PROBLEM_REASONS:
            return PodProblem(reason)
    return None


def node_of(spec: Mapping[str, Any]) -> NodeClass:
    """Return the node class that a pod's spec needs, from resources, node selector and tolerations as we write them."""
    devices = {
        name
        for container in spec.get("containers") or ()
        for name in ((container.get("resources") or {}).get("limits") or {})
        if name.startswith(_DEVICES)
    }
    node_selector = spec.get("nodeSelector") or {}
    tolerated_keys = {each.get("key") for each in spec.get("tolerations") or ()}
    is_only = any(node_selector.get(key) == value for key, value in _SPOT.items())
    spot = "only" if is_only else "may" if tolerated_keys & _SPOT.keys() else "no"
    return NodeClass(min(devices, default="cpu").removeprefix(_DEVICES), node_selector.get(_ZONE) or ANY_ZONE, spot)


def _is_waiting(pod: ObservedPod) -> bool:
    return pod.unschedulable_since_s is not None and not pod.is_leaving


def _since_s(then_s: float, now_s: float) -> float:
    """Return the seconds since a time of the cluster's clock. Our clock may be behind: a future time is now."""
    return max(0.0, now_s - then_s)


def _remaining_s(node_s: float, waited_s: float) -> float:
    """Return the rest of a wait. A wait that is longer than the mean is estimated from its own length."""
    return node_s - waited_s if waited_s < node_s else OVERDUE_RATIO * waited_s


def _add(means: OrderedDict[Any, RunningMean], key: Any, seconds: float, max_entries: int) -> None:
    mean = means.pop(key, None) or RunningMean(0.0)
    means[key] = mean.with_sample(max(0.0, seconds))
    while len(means) > max_entries:
        means.popitem(last=False)


def _condition_time_s(entry: Json, metadata: Json) -> float | None:
    """Return when a condition changed last; if it does not say, when the object was created."""
    changed_s = parse_time_s(entry.get("lastTransitionTime"))
    return changed_s if changed_s is not None else parse_time_s(metadata.get("creationTimestamp"))
