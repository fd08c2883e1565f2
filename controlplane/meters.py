"""What the control plane counts and tells: replicas by state, device slots, how restores went. Hears of them as a
listener of the actuator.
"""

import time
from collections.abc import Callable
from typing import Final

from contracts.errors import Failure
from contracts.problem import code_of
from contracts.timeline import Stamp
from controlplane.facts import VersionKey
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica, ReplicaTable
from telemetry.policy.instruments import Kind, Labels, by
from telemetry.policy.labels import OK, outcome_of, slowest_tier
from telemetry.policy.spans import RestoreFacts
from telemetry.telemetry import Telemetry

SECONDS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RestoreMeters:
    """Restores that this control plane saw from start to end; adopted replicas are another one's to count."""

    def __init__(self, telemetry: Telemetry, table: ReplicaTable, *, wall: Callable[[], float] = time.time) -> None:
        self._telemetry = telemetry
        self._wall = wall
        self._failures = 0
        page = telemetry.page
        self._times = page.histogram(
            "kelvin_restore_seconds", "From asking for a replica to its readiness.", ("tier",), SECONDS
        )
        self._failed = page.counter("kelvin_restore_failures_total", "Restores that came to nothing.", ("outcome",))
        page.read("kelvin_replicas", "Processes by state.", Kind.GAUGE, ("state",), lambda: _by_state(table))
        page.read(
            "kelvin_device_slots",
            "Room for replicas on this machine.",
            Kind.GAUGE,
            ("state",),
            lambda: by((("held", table.held), ("free", table.slots - table.held))),
        )

    def ready(self, replica: Replica) -> None:
        """Count it, by the slowest tier that it had to wait for."""
        assert replica.key is not None
        if not replica.bytes_by_tier:
            return
        took_us = max(span.after_us for span in replica.restore)
        self._times.observe((slowest_tier(dict(replica.bytes_by_tier)),), took_us / 1e6)
        self._telemetry.restore(
            RestoreFacts(
                name=replica.runtime_id,
                tenant=replica.key.tenant,
                model=replica.key.model,
                version=replica.key.version,
                outcome=OK,
                began_at_us=int(self._wall() * 1e6) - took_us,
                stamps=tuple(Stamp(span.stage, span.after_us) for span in replica.restore),
                bytes_by_tier=replica.bytes_by_tier,
            )
        )

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """Count it. What the replica did until then is not known."""
        now_us = int(self._wall() * 1e6)
        self._failures += 1
        self._failed.add((outcome_of(code_of(failure)),))
        self._telemetry.restore(
            RestoreFacts(
                name=f"{key} {now_us} {self._failures}",
                tenant=key.tenant,
                model=key.model,
                version=key.version,
                outcome=code_of(failure),
                began_at_us=now_us,
            )
        )

    def lost(self, replica: Replica) -> None:
        """Says nothing of restores."""


def _by_state(table: ReplicaTable) -> dict[Labels, float]:
    return by((str(state), table.count(state)) for state in ReplicaState)
