"""Metrics of replicas, device slots, standbys and restores. `RestoreMetrics` is a listener of the actuator."""

import time
from collections.abc import Callable
from typing import Final

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local.footprints import Footprint
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, ReplicaTable
from kelvin.contracts.errors import Failure
from kelvin.contracts.timeline import Stamp
from kelvin.telemetry.policy.instruments import Labels, MetricKind, MetricsPage, series_by_label
from kelvin.telemetry.policy.labels import OK, outcome_of, slowest_tier
from kelvin.telemetry.policy.spans import RestoreFacts
from kelvin.telemetry.telemetry import Telemetry

RESTORE_BUCKETS_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RestoreMetrics:
    """Counts the restores that this control plane began and finished. Restores of adopted replicas are not counted."""

    def __init__(self, telemetry: Telemetry, table: ReplicaTable, *, wall: Callable[[], float] = time.time) -> None:
        self._telemetry = telemetry
        self._wall = wall
        self._failures = 0
        page = telemetry.page
        self._times = page.histogram(
            "kelvin_restore_seconds",
            "Seconds from a request until its replica is ready.",
            ("tier",),
            RESTORE_BUCKETS_S,
        )
        self._failed = page.counter("kelvin_restore_failures_total", "Restores that failed.", ("outcome",))
        page.callback("kelvin_replicas", "Processes by state.", MetricKind.GAUGE, ("state",), lambda: _by_state(table))
        page.callback(
            "kelvin_device_slots",
            "Room for replicas on this machine.",
            MetricKind.GAUGE,
            ("state",),
            lambda: series_by_label((("held", table.held_slots), ("free", table.slots - table.held_slots))),
        )

    def on_replica_ready(self, replica: Replica) -> None:
        """Count the restore by the slowest tier that it read from."""
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

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """Count the failed restore. Its stages are unknown."""
        now_us = int(self._wall() * 1e6)
        self._failures += 1
        self._failed.add((outcome_of(failure.code),))
        self._telemetry.restore(
            RestoreFacts(
                name=f"{key} {now_us} {self._failures}",
                tenant=key.tenant,
                model=key.model,
                version=key.version,
                outcome=failure.code,
                began_at_us=now_us,
            )
        )

    def on_replica_lost(self, replica: Replica) -> None:
        """Ignore deaths, which are not restores."""


def register_pending_metric(page: MetricsPage, pending: Callable[[], dict[Labels, float]]) -> None:
    """Register the number of replicas that wait for room, by their requirements: an input for a node autoscaler."""
    page.callback(
        "kelvin_pending_replicas", "Replicas that are wanted and have no node, or no device slot.", MetricKind.GAUGE,
        ("device", "zone", "spot"), pending,
    )  # fmt: skip


def register_pool_metrics(page: MetricsPage, pool: StandbyPool) -> None:
    """Register metrics of the standby pool: sizes, takes, and the memory of zygote and standbys."""

    def counts() -> dict[Labels, float]:
        state = pool.state()
        found = (("wanted", state.size.wanted), ("parked", state.parked), ("forking", state.forked))
        return {(state.device, name): count for name, count in found}

    def takes() -> dict[Labels, float]:
        state = pool.state()
        return {(state.device, taker, result): count for (taker, result), count in state.counts.items()}

    def memory() -> dict[Labels, float]:
        return _memory_series("zygote", pool.footprints.zygote) | _memory_series("standbys", pool.footprints.standbys)

    page.callback(
        "kelvin_standbys", "Processes without a version, and how many there should be.", MetricKind.GAUGE,
        ("device", "state"), counts,
    )  # fmt: skip
    page.callback(
        "kelvin_standby_takes_total", "Starts and jobs by whether a standby was parked.", MetricKind.COUNTER,
        ("device", "taker", "result"), takes,
    )  # fmt: skip
    page.gauge(
        "kelvin_standby_probability", "Probability that the next start finds one of the wanted standbys.",
        lambda: pool.state().size.probability,
    )  # fmt: skip
    page.gauge(
        "kelvin_standby_replace_seconds", "Mean seconds until a taken standby is replaced.",
        lambda: pool.state().takes.replace_s,
    )  # fmt: skip
    page.callback(
        "kelvin_platform_memory_bytes", "Memory of zygote and standbys.", MetricKind.GAUGE, ("of", "measure"), memory
    )
    page.gauge("kelvin_standby_budget_bytes", "Memory limit of all standbys.", lambda: float(pool.sizing.budget_bytes))


def _memory_series(name: str, footprint: Footprint) -> dict[Labels, float]:
    return {(name, "pss"): footprint.pss_bytes, (name, "private"): footprint.private_bytes}


def _by_state(table: ReplicaTable) -> dict[Labels, float]:
    return series_by_label((str(state), table.count(state)) for state in ReplicaState)
