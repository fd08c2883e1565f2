"""Interfaces to the part that runs the versions: the processes of one machine, or a cluster."""

from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter

from controlplane.api.types.admin_types import ModelStatus, Status
from controlplane.registry.policy.domain import Model, VersionKey
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.replicas import Replica
from controlplane.scaling.start_outcomes import StartOutcomes
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.serving.control_messages import StartProblem, Stats
from kelvin.ipc.engine_jobs import PushJobs


class ReplicaLookup(Protocol):
    """All replicas, by version. Answers come from memory."""

    def __iter__(self) -> Iterator[Replica]: ...

    def replicas_of(self, key: VersionKey) -> tuple[Replica, ...]:
        """Return the version's replicas in any state, the oldest first."""
        ...

    def ready_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests."""
        ...

    def live_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests or will soon."""
        ...

    def sleepers(self, key: VersionKey) -> tuple[Replica, ...]:
        """Return the sleeping replicas: they keep memory and compute nothing."""
        ...

    def is_present(self, key: VersionKey) -> bool:
        """Return whether the version has a process or will have one. If so, the version must not be deleted."""
        ...


class Scaler(Protocol):
    """Decides how many replicas a version has. All calls return at once."""

    def observe(self, stats: Stats) -> None:
        """Record an activator's reports."""

    def tick(self) -> None:
        """Decide now, because models or tenants have changed."""

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """End the replicas of these versions now. The registry and the tenants decide whether they may start again."""

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if this installation can't scale the model that way."""


@dataclass(frozen=True, slots=True)
class ReplicaBackend:
    """The part that runs the versions (one machine or a cluster), as the routes see it. `routers` are the routes that
    only this backend has.
    """

    replicas: ReplicaLookup
    outcomes: StartOutcomes
    scaler: Scaler
    jobs: PushJobs
    is_ready: Callable[[], Awaitable[bool]]
    build_status: Callable[
        [tuple[ModelStatus, ...]], Awaitable[Status]
    ]  # for operators: the installation with these models
    record_answers: Callable[[tuple[RequestRecord, ...]], None]  # called with requests that have ended
    # Returns the ids of the replicas that are alive. None if this backend does not know them.
    find_live_replicas: Callable[[], Collection[str]] | None
    routers: tuple[APIRouter, ...]
    # Returns what keeps every version of a tenant from starting. None if nothing can.
    find_start_obstacle: Callable[[str], Awaitable[StartProblem | None]] | None
