"""Who leads, by a Lease that candidates renew in turn. Pure; asking the cluster is `lease`'s work.

As client-go's leaderelection: nobody's wall clock is believed. A candidate waits for the holder's duration from when it
saw the Lease change for the last time, on its own clock; the holder stops leading earlier than that after the last
renewal that it began. Times are seconds of a clock that does not step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kelvin.contracts.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class LeaseDurations:
    """`lease_s`: how long others wait. `hold_s`: how long a leader leads without a renewal. `retry_s`: how often."""

    lease_s: int = 15
    hold_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.hold_s < self.lease_s:
            msg = f"{self}: each must be less than the one before"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a Lease says. An empty holder has given it up."""

    holder: str
    duration_s: float
    renewed: str
    transitions: int
    version: str


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease, and since when it has been as it is, by our own clock."""

    record: LeaseRecord
    since: float


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """It is free, or ours."""


@dataclass(frozen=True, slots=True)
class AwaitHolder:
    """It is another's, until then at least."""

    until: float


FREE: Final = ""
LOSS_PAUSE_MAX_S: Final = 60.0  # before one that lost it stands again


def observe(before: ObservedLease | None, record: LeaseRecord | None, now: float) -> ObservedLease | None:
    """What is known after a look. A Lease that somebody deleted counts as it was: its holder may not know of it."""
    if record is None:
        return before
    return before if before is not None and before.record == record else ObservedLease(record, now)


def decide(observed: ObservedLease | None, identity: str, now: float) -> AcquireLease | AwaitHolder:
    """Whether to write ourselves in."""
    if observed is None or observed.record.holder in (FREE, identity):
        return AcquireLease()
    until = observed.since + observed.record.duration_s
    return AcquireLease() if now >= until else AwaitHolder(until)


def leads_until(begun: float, terms: LeaseDurations) -> float:
    """Of a renewal that was begun then and succeeded: others may have seen it at once, not before."""
    return begun + terms.hold_s


def losses_after(losses: int, led_s: float) -> int:
    """How many soon after one another, with one more, after a lead of that long."""
    return 1 if led_s > LOSS_PAUSE_MAX_S else losses + 1


def pause_s(losses: int, terms: LeaseDurations, luck: float) -> float:
    """Return the pause before it stands again, shortened by up to half by `luck` in [0, 1)."""
    return ExponentialBackoff(terms.retry_s, LOSS_PAUSE_MAX_S).after(losses, luck)


def read(obj: Mapping[str, Any], terms: LeaseDurations) -> LeaseRecord:
    """A Lease as the cluster has it; what it does not say is as ours."""
    spec = obj.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or FREE,
        duration_s=float(spec.get("leaseDurationSeconds") or terms.lease_s),
        renewed=str(spec.get("renewTime", "")),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(obj["metadata"].get("resourceVersion", "")),
    )


def acquired_spec(before: Mapping[str, Any] | None, identity: str, at: str, terms: LeaseDurations) -> dict[str, Any]:
    """The spec with which we take or renew it. `at` is the wall clock's second, for people, with any microseconds."""
    record = before or {}
    mine = record.get("holderIdentity") == identity
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": terms.lease_s,
        "acquireTime": record.get("acquireTime", at) if mine else at,
        "renewTime": at,
        "leaseTransitions": int(record.get("leaseTransitions") or 0) + (0 if mine or before is None else 1),
    }


def released_spec(before: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The spec with which we leave it to whoever comes first."""
    return {**before, "holderIdentity": FREE, "leaseDurationSeconds": 1, "renewTime": at}
