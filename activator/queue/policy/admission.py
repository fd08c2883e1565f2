"""Decide whether a request may go to a replica now, may wait, or is refused. The throttler does the waiting."""

from dataclasses import dataclass
from typing import Final

import msgspec

from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage, QueueUsageByTenant
from activator.queue.policy.queued_request import QueuedRequest
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Failure
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait (requests, bytes, tokens) per version, per tenant and in total, and for how long."""

    per_version: QueueLimit
    per_tenant: QueueLimit
    total: QueueLimit
    wait_s: float


class AdmissionFacts(msgspec.Struct, frozen=True):
    """The state of queues and slots when a request arrives."""

    has_slot: bool  # a slot is free that this tenant may have
    queued_request: QueuedRequest
    version_usage: QueueUsage  # in the queue of its version
    usage_by_tenant: QueueUsageByTenant
    limits: QueueLimits
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class Admit:
    """A slot is free for this request."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until `until_s` (monotonic) at most. With `full_failure`, first shed lower requests, or refuse with it."""

    until_s: float
    full_failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse with this failure."""

    failure: Failure


Admission = Admit | Hold | Shed
ADMIT: Final = Admit()


def decide(facts: AdmissionFacts, now: float) -> Admission:
    """Return the first decision that applies.

    1. The deadline has passed: shed.
    2. A slot is free, which no waiting request may take: admit.
    3. A queue is full: hold with the refusal. The caller sheds lower requests, or refuses this one.
    4. Otherwise hold.
    """
    # (1)
    if facts.deadline.has_passed(now):
        return Shed(DeadlineExceeded(0.0, "admitting"))
    # (2)
    if facts.has_slot:
        return ADMIT
    queued_request, limits = facts.queued_request, facts.limits
    until_s = min(facts.deadline.at_s, now + limits.wait_s)
    # (3)
    for queue, usage, limit in (
        ("the queue of this model", facts.version_usage, limits.per_version),
        ("the queue of your tenant", facts.usage_by_tenant.usage_of(queued_request.tenant), limits.per_tenant),
        ("the queue", facts.usage_by_tenant.total, limits.total),
    ):
        if (exceeded := usage.exceeded_limit(queued_request, limit)) is not None:
            return Hold(until_s, Overloaded(queue, exceeded.limit, RETRY_AFTER_S, exceeded.unit))
    # (4)
    return Hold(until_s)
