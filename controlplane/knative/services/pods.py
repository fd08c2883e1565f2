"""The pods that run versions, as the routes look replicas up. Writers: `version_status.py` and `pool_actuator.py`."""

from collections.abc import Iterator
from dataclasses import replace

from controlplane.clock import Clock
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.replica_lifecycle import LIVE, SERVING, ReplicaState
from controlplane.scaling.replicas import Replica
from kelvin.contracts.serving.control_messages import ReplicaRow


class PodTable:
    """All pods, by name and by version. `device_class` decides the price of their seconds. `slots` bounds the devices
    of all pods together; None is no bound.
    """

    def __init__(self, clock: Clock, device_class: str, slots: int | None = None) -> None:
        self.slots = slots
        self._clock = clock
        self._device_class = device_class
        self._pods: dict[str, Replica] = {}
        self._by_key: dict[VersionKey, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<PodTable pods={len(self._pods)} versions={len(self._by_key)}>"

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._pods.values()))

    def replicas_of(self, key: VersionKey) -> tuple[Replica, ...]:
        """Return the version's pods in any state, the one seen first before others."""
        return tuple(self._pods[name] for name in self._by_key.get(key, ()))

    def active_versions(self) -> tuple[VersionKey, ...]:
        """Return the versions that have a pod."""
        return tuple(self._by_key)

    def ready_count(self, key: VersionKey) -> int:
        """Return how many pods the cluster calls ready."""
        return sum(pod.state in SERVING for pod in self.replicas_of(key))

    def live_count(self, key: VersionKey) -> int:
        """Return how many pods are ready or will be."""
        return sum(pod.state in LIVE for pod in self.replicas_of(key))

    def sleepers(self, key: VersionKey) -> tuple[Replica, ...]:
        """Return nothing: pods never sleep."""
        return ()

    def is_present(self, key: VersionKey) -> bool:
        """Return False: pods end with their version's Service, so they never prevent a deletion."""
        return False

    def upsert(self, row: ReplicaRow) -> Replica | None:
        """Store a pod's present state. Return the replica if it became ready just now."""
        key = VersionKey(row.tenant, row.model, row.version)
        state = _state(row)
        before = self._pods.get(row.runtime_id)
        if before is not None and before.key != key:
            self.remove(row.runtime_id)
            before = None
        if before is None:
            pod = Replica(row.runtime_id, state, self._clock.monotonic_us(), key=key, device_class=self._device_class)
        else:
            pod = before if before.state is state else replace(before, state=state, since_us=self._clock.monotonic_us())
        pod = replace(pod, max_streams=row.max_streams, url=row.url)
        self._pods[row.runtime_id] = pod
        self._by_key.setdefault(key, {})[row.runtime_id] = None
        is_new = state is ReplicaState.READY and (before is None or before.state is not state)
        return pod if is_new else None

    def remove(self, name: str) -> None:
        """Remove a pod that is gone. An unknown name is no error."""
        pod = self._pods.pop(name, None)
        if pod is not None and pod.key is not None:
            names = self._by_key[pod.key]
            del names[name]
            if not names:
                del self._by_key[pod.key]


def _state(row: ReplicaRow) -> ReplicaState:
    if row.draining:
        return ReplicaState.DRAINING
    return ReplicaState.RESTORING if row.unproven else ReplicaState.READY
