"""What the control plane asks of whoever runs its versions: the processes of one machine, or a cluster."""

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
    """What runs, by version. Answers from memory."""

    def __iter__(self) -> Iterator[Replica]: ...

    def of(self, key: VersionKey) -> tuple[Replica, ...]:
        """Those of a version in any state, the oldest first."""
        ...

    def ready(self, key: VersionKey) -> int:
        """Those that take requests."""
        ...

    def live(self, key: VersionKey) -> int:
        """Those that take requests or will."""
        ...

    def sleepers(self, key: VersionKey) -> tuple[Replica, ...]:
        """Those that keep memory and compute nothing."""
        ...

    def is_present(self, key: VersionKey) -> bool:
        """Whether a process runs it, or is about to, that would outlive it. Such a version is not deleted."""
        ...


class Scaler(Protocol):
    """Decides how many replicas a version has. All calls return at once."""

    def observe(self, stats: Stats) -> None:
        """Take in an activator's reports."""

    def tick(self) -> None:
        """Decide now, because what is wanted of models has changed."""

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        """End their replicas now. Whether they may start again follows from the registry and the tenants."""

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if the model can't be scaled so here."""


@dataclass(frozen=True, slots=True)
class ReplicaBackend:
    """What runs the versions, one machine or a cluster, as the routes know it. `routers` are those that only it can
    answer.
    """

    replicas: ReplicaLookup
    outcomes: StartOutcomes
    decider: Scaler
    jobs: PushJobs
    ready: Callable[[], Awaitable[bool]]
    status: Callable[[tuple[ModelStatus, ...]], Awaitable[Status]]  # the installation's, of these models: for operators
    record_answers: Callable[[tuple[RequestRecord, ...]], None]  # hears of requests that ended
    find_live_replicas: (
        Callable[[], Collection[str]] | None
    )  # names in the ledger of who has not died; None where nobody knows
    routers: tuple[APIRouter, ...]
    # What keeps a tenant's versions from being started, whatever they are; None where nothing can.
    find_start_obstacle: Callable[[str], Awaitable[StartProblem | None]] | None
