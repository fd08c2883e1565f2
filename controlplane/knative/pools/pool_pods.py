"""The pods of pools, each with what it has and does as far as is known. Nothing here asks or tells anybody."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.knative.policy.pod_placement import FreePod
from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.artifacts.runtime_control import BindPodRequest


class PodState(StrEnum):
    """Of a pod, as the control plane knows it."""

    UNKNOWN = "unknown"  # to be asked
    PARKED = "parked"
    BINDING = "binding"
    BOUND = "bound"
    LEAVING = "leaving"  # gives its version up, or is ended by the cluster


@dataclass(slots=True)
class PoolPod:
    """`namespace` and `pool` are where it is from, `control_url` where it is told what to do, `url` where requests go.

    From BINDING on `take` is what it was told, or found with.
    """

    name: str
    namespace: str
    pool: str
    weight_bytes: int
    url: str
    control_url: str
    since_us: int
    state: PodState = PodState.UNKNOWN
    is_ending: bool = False  # by the cluster: nothing follows
    runtime_id: str = ""
    key: VersionKey | None = None
    take: BindPodRequest | None = None
    max_streams: int = 0
    written_deletion_cost: str | None = None  # of its deletion, as it was written
    refusals: int = 0  # in a row, of that write
    is_probing: bool = False  # what it does, at this moment

    def __repr__(self) -> str:
        return f"<PoolPod {self.pool}/{self.name} {self.state} {self.key or ''}>"


@dataclass(slots=True)
class PoolPods:
    """All of them, by namespace and name."""

    _pods: dict[NamespacedName, PoolPod] = field(default_factory=dict)

    def __iter__(self) -> Iterator[PoolPod]:
        return iter(tuple(self._pods.values()))

    def at(self, place: NamespacedName) -> PoolPod | None:
        """That one."""
        return self._pods.get(place)

    def add(self, pod: PoolPod) -> None:
        """It was seen first."""
        self._pods[pod.namespace, pod.name] = pod

    def drop(self, pod: PoolPod) -> None:
        """It is gone."""
        self._pods.pop((pod.namespace, pod.name), None)

    def has(self, pod: PoolPod) -> bool:
        """Whether it is still there, and not another one of its name."""
        return self._pods.get((pod.namespace, pod.name)) is pod

    def of(self, key: VersionKey, *states: PodState) -> list[PoolPod]:
        """Those with that version, in these states, the one that has had it for longest first."""
        found = [pod for pod in self._pods.values() if pod.key == key and pod.state in states]
        return sorted(found, key=lambda pod: pod.since_us)

    def keys(self) -> set[VersionKey]:
        """Versions that some pod has."""
        return {pod.key for pod in self._pods.values() if pod.key is not None}

    def free_pods(self) -> Iterable[FreePod]:
        """Those that wait."""
        return [
            FreePod(f"{pod.namespace}/{pod.name}", pod.weight_bytes, pod.since_us)
            for pod in self._pods.values()
            if pod.state is PodState.PARKED and not pod.is_ending
        ]

    def parked(self, free_pod: FreePod) -> PoolPod:
        """The pod that waits there."""
        namespace, _, name = free_pod.pod.partition("/")
        return self._pods[namespace, name]

    def count_taken(self) -> dict[str, int]:
        """By pool, pods that have a version and don't end."""
        found: dict[str, int] = {}
        for pod in self._pods.values():
            if pod.key is not None and not pod.is_ending:
                found[pod.pool] = found.get(pod.pool, 0) + 1
        return found

    def check_integrity(self) -> None:
        """Assert that a version and its order come and go together."""
        for place, pod in self._pods.items():
            assert place == (pod.namespace, pod.name)
            assert (pod.key is None) == (pod.take is None)
            assert (pod.key is not None) or pod.state in (PodState.UNKNOWN, PodState.PARKED)
