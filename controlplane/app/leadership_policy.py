"""Decide who leads by a Lease that its holder renews. Pure; `leader_election.py` calls the cluster.

Follows client-go's `leaderelection`: wall clocks of other machines are not trusted. A candidate waits for the holder's
duration after it last saw the Lease change, on its own clock. The holder stops leading earlier than that: it counts
from the start of its last successful renewal. Times are seconds of a clock that does not step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kelvin.contracts.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class LeaseDurations:
    """Other candidates wait for `lease_s`. A leader leads for `hold_s` without a renewal. Calls are `retry_s` apart."""

    lease_s: int = 15
    hold_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.hold_s < self.lease_s:
            msg = f"{self}: each must be less than the one before"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Contents of a Lease. An empty holder means that the Lease was released."""

    holder: str
    duration_s: float
    renewed: str
    transitions: int
    version: str


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease, and the time on our clock since when it has not changed."""

    record: LeaseRecord
    since: float


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Take the Lease: it is free, expired, or ours."""


@dataclass(frozen=True, slots=True)
class AwaitHolder:
    """Another candidate holds the Lease, at least until that time."""

    until: float


FREE: Final = ""
LOSS_PAUSE_MAX_S: Final = 60.0  # longest pause before a candidate that lost the lead tries again


def observe(before: ObservedLease | None, record: LeaseRecord | None, now: float) -> ObservedLease | None:
    """Return the Lease after a read. A deleted Lease counts as unchanged: its holder may not know of the deletion."""
    if record is None:
        return before
    return before if before is not None and before.record == record else ObservedLease(record, now)


def decide(observed: ObservedLease | None, identity: str, now: float) -> AcquireLease | AwaitHolder:
    """Decide whether to write ourselves into the Lease."""
    if observed is None or observed.record.holder in (FREE, identity):
        return AcquireLease()
    until = observed.since + observed.record.duration_s
    return AcquireLease() if now >= until else AwaitHolder(until)


def leads_until(begun: float, durations: LeaseDurations) -> float:
    """Return until when a renewal begun at `begun` holds. Others saw it at that time at the earliest."""
    return begun + durations.hold_s


def losses_after(losses: int, led_s: float) -> int:
    """Return the number of losses in quick succession, after one more loss that ended a lead of `led_s` seconds."""
    return 1 if led_s > LOSS_PAUSE_MAX_S else losses + 1


def pause_s(losses: int, durations: LeaseDurations, jitter: float) -> float:
    """Return the pause before the next candidacy, shortened by up to half by `jitter` in [0, 1)."""
    return ExponentialBackoff(durations.retry_s, LOSS_PAUSE_MAX_S).delay_s(losses, jitter)


def read(obj: Mapping[str, Any], durations: LeaseDurations) -> LeaseRecord:
    """Return the contents of a Lease object. Fields that it lacks are ours."""
    spec = obj.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or FREE,
        duration_s=float(spec.get("leaseDurationSeconds") or durations.lease_s),
        renewed=str(spec.get("renewTime", "")),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(obj["metadata"].get("resourceVersion", "")),
    )


def acquired_spec(
    before: Mapping[str, Any] | None, identity: str, now: str, durations: LeaseDurations
) -> dict[str, Any]:
    """Return the spec that takes or renews the Lease. `now` is wall clock time for people, with any microseconds."""
    record = before or {}
    is_renewal = record.get("holderIdentity") == identity
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": durations.lease_s,
        "acquireTime": record.get("acquireTime", now) if is_renewal else now,
        "renewTime": now,
        "leaseTransitions": int(record.get("leaseTransitions") or 0) + (0 if is_renewal or before is None else 1),
    }


def released_spec(before: Mapping[str, Any], now: str) -> dict[str, Any]:
    """Return the spec that releases the Lease, so that the next candidate takes it at once."""
    return {**before, "holderIdentity": FREE, "leaseDurationSeconds": 1, "renewTime": now}
