"""The table of pooled pods, with their versions and states as far as known. It makes no calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.knative.policy.pod_placement import FreePod
from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.artifacts.runtime_control import BindPodRequest


class PodState(StrEnum):
    """State of a pod, as the control plane knows it."""

    UNKNOWN = "unknown"  # not probed yet
    PARKED = "parked"
    BINDING = "binding"
    BOUND = "bound"
    LEAVING = "leaving"  # releases its version, or is ended by the cluster


@dataclass(slots=True)
class PoolPod:
    """A pooled pod. `control_url` takes orders, `url` takes requests. `bind_request` is the version's, from
    BINDING on.
    """

    name: str
    namespace: str
    pool: str
    weight_bytes: int
    url: str
    control_url: str
    since_us: int
    state: PodState = PodState.UNKNOWN
    is_ending: bool = False  # by the cluster: no new life follows
    runtime_id: str = ""
    key: VersionKey | None = None
    bind_request: BindPodRequest | None = None
    max_streams: int = 0
    written_deletion_cost: str | None = None  # as last written; None: not yet
    refusals: int = 0  # in a row, of that write
    is_probing: bool = False  # a probe is in flight

    def __repr__(self) -> str:
        return f"<PoolPod {self.pool}/{self.name} {self.state} {self.key or ''}>"


@dataclass(slots=True)
class PoolPods:
    """All pooled pods, by namespace and name."""

    _pods: dict[NamespacedName, PoolPod] = field(default_factory=dict)

    def __iter__(self) -> Iterator[PoolPod]:
        return iter(tuple(self._pods.values()))

    def find(self, object_name: NamespacedName) -> PoolPod | None:
        """Return the pod of that name; None if it is unknown."""
        return self._pods.get(object_name)

    def add(self, pod: PoolPod) -> None:
        """Add a pod that was not known before."""
        self._pods[pod.namespace, pod.name] = pod

    def remove(self, pod: PoolPod) -> None:
        """Remove a pod that is gone; an unknown one is no error."""
        self._pods.pop((pod.namespace, pod.name), None)

    def contains(self, pod: PoolPod) -> bool:
        """Return whether this very pod is in the table, not another one with its name."""
        return self._pods.get((pod.namespace, pod.name)) is pod

    def pods_of(self, key: VersionKey, *states: PodState) -> list[PoolPod]:
        """Return the pods with that version in these states. The one that has been in its state longest is first."""
        found = [pod for pod in self._pods.values() if pod.key == key and pod.state in states]
        return sorted(found, key=lambda pod: pod.since_us)

    def keys(self) -> set[VersionKey]:
        """Return the versions that some pod has."""
        return {pod.key for pod in self._pods.values() if pod.key is not None}

    def free_pods(self) -> Iterable[FreePod]:
        """Return the pods that wait for a version."""
        return [
            FreePod(f"{pod.namespace}/{pod.name}", pod.weight_bytes, pod.since_us)
            for pod in self._pods.values()
            if pod.state is PodState.PARKED and not pod.is_ending
        ]

    def find_free(self, free_pod: FreePod) -> PoolPod:
        """Return the pod that `free_pod` describes."""
        namespace, _, name = free_pod.pod.partition("/")
        return self._pods[namespace, name]

    def count_taken(self) -> dict[str, int]:
        """Return by pool how many pods have a version and are not ending."""
        found: dict[str, int] = {}
        for pod in self._pods.values():
            if pod.key is not None and not pod.is_ending:
                found[pod.pool] = found.get(pod.pool, 0) + 1
        return found

    def check_integrity(self) -> None:
        """Assert that a pod has a version exactly if it has a bind request."""
        for object_name, pod in self._pods.items():
            assert object_name == (pod.namespace, pod.name)
            assert (pod.key is None) == (pod.bind_request is None)
            assert (pod.key is not None) or pod.state in (PodState.UNKNOWN, PodState.PARKED)
