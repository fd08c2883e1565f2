"""Record how starts went: the last attempt of each version for operators, and the version's state for the registry.

Records are written afterwards, in the background: a cold start never waits for them.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.api.types.admin_types import ReplicaDeath
from controlplane.knative.policy.rollout_waves import ImageBehind
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.policy.version_lifecycle import VersionEvent, is_version_fault
from controlplane.registry.registry import Registry
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.start_problem import crash_loop, problem_from_failure
from controlplane.scaling.replicas import Replica
from controlplane.tasks import Tasks
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import Feed, StartProblem, StartProblemRow
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.traffic_errors import StartReason

log = logging.getLogger(__name__)

MAX_AWAITED_EXIT_RECORDS: Final = 64  # deaths that wait for their lifetime record


@dataclass(frozen=True, slots=True)
class LastRestore:
    """How a version's last start went. `failure` is its code and message; None if it succeeded."""

    spans: tuple[StageSpan, ...]
    failure: tuple[str, str] | None


class StartOutcomes:
    """The actuator's listener for start results. The first start of a version drops records of deleted versions."""

    def __init__(self, registry: Registry, feed: FeedHub, tasks: Tasks) -> None:
        self._registry = registry
        self._feed = feed
        self._tasks = tasks
        self._last: dict[VersionKey, LastRestore] = {}
        self.images_behind: Mapping[
            VersionKey, ImageBehind
        ] = {}  # cluster only: versions that still run an older image
        self._exits: dict[VersionKey, int] = {}  # last bad exit status since a replica was ready
        # Runtimes that ended unexpectedly and have no lifetime record yet.
        self._awaited_exit_records: deque[str] = deque(maxlen=MAX_AWAITED_EXIT_RECORDS)
        self._deaths: dict[VersionKey, ReplicaDeath] = {}

    def __repr__(self) -> str:
        return f"<StartOutcomes versions={len(self._last)}>"

    def last_attempt(self, key: VersionKey) -> LastRestore | None:
        """Return the version's last start; None if this control plane has seen none."""
        return self._last.get(key)

    def last_death(self, key: VersionKey) -> ReplicaDeath | None:
        """Return the version's last replica that ended unexpectedly; None if this control plane has seen none."""
        return self._deaths.get(key)

    def problem(self, key: VersionKey) -> StartProblem | None:
        """Return why the version does not start; None if it starts or the reason is unknown."""
        return self._feed.start_problem((key.tenant, key.model, key.version))

    def set_problem(self, key: VersionKey, problem: StartProblem) -> None:
        """Record why the version does not start, and publish the reason if it changed. Does nothing if the version is
        unknown or deleted: no later event would remove the row.
        """
        if self._registry.find(key) is not None and self.problem(key) != problem:
            row = StartProblemRow(tenant=key.tenant, model=key.model, version=key.version, problem=problem)
            self._feed.publish(Feed(start_problems=(row,)))

    def clear_problem(self, key: VersionKey, reason: StartReason | None = None) -> None:
        """Remove the version's start problem. With `reason`, remove it only if it is this one."""
        known = self.problem(key)
        if known is not None and reason in (None, known.reason):
            self._feed.publish(Feed(removed_start_problems=((key.tenant, key.model, key.version),)))

    def set_slot_shortage(self, problem: StartProblem, key: VersionKey, is_short_of_slots: bool) -> None:
        """Set `problem` (no room for the version), or clear it."""
        if is_short_of_slots:
            self.set_problem(key, problem)
        else:
            self.clear_problem(key, problem.reason)

    def record_exits(self, records: Iterable[LifetimeRecord]) -> None:
        """Record how processes ended. The problem of a crash loop then names the last exit status."""
        for record in records:
            if record.tenant is None or record.model is None or record.version is None:
                continue
            key = VersionKey(record.tenant, record.model, record.version)
            if record.runtime_id in self._awaited_exit_records:
                self._awaited_exit_records.remove(record.runtime_id)
                at_s = record.died_at_us // 1_000_000
                self._deaths[key] = ReplicaDeath(record.runtime_id, at_s, record.exit_status)
            if not record.exit_status:
                continue
            known = self.problem(key)
            if known is not None and known.reason == "crash_loop":
                self.set_problem(key, problem_from_failure(crash_loop(record.exit_status)))
            if key in self._last:
                self._exits[key] = record.exit_status

    def on_replica_ready(self, replica: Replica) -> None:
        """Record a restore that succeeded: the version's bytes are good."""
        assert replica.key is not None
        self._record_attempt(replica.key, LastRestore(replica.restore, None))
        self._exits.pop(replica.key, None)
        self.clear_problem(replica.key)
        self._record_version_event(replica.key, VersionEvent.RESTORED, None)

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """Record a restore that failed. The version is marked broken only if the failure is about its bytes."""
        self._record_attempt(key, LastRestore((), (failure.code, failure.message)))
        problem = problem_from_failure(failure)
        if problem.reason == "crash_loop" and problem.exit_status is None:
            problem = problem_from_failure(crash_loop(self._exits.get(key)))
        self.set_problem(key, problem)
        if is_version_fault(failure.code):
            self._record_version_event(key, VersionEvent.FOUND_BROKEN, failure.code)

    def on_replica_lost(self, replica: Replica) -> None:
        """Expect a lifetime record if the replica ended unexpectedly. A death does not blame the version's bytes."""
        if replica.state not in (ReplicaState.DRAINING, ReplicaState.ENDING):
            self._awaited_exit_records.append(replica.runtime_id)

    def _record_attempt(self, key: VersionKey, last_attempt: LastRestore) -> None:
        if key not in self._last:
            for gone in [each for each in {*self._last, *self._deaths} if self._registry.find(each) is None]:
                self._last.pop(gone, None)
                self._exits.pop(gone, None)
                self._deaths.pop(gone, None)
        self._last[key] = last_attempt

    def _record_version_event(self, key: VersionKey, event: VersionEvent, fault: str | None) -> None:
        self._tasks.start(self._registry.record_event(key, event, fault), f"note {event} of {key}")
