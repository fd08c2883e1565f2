"""Decide whether a request may go to a replica now, may wait, or is refused. Waiting is the throttler's work."""

from dataclasses import dataclass

from activator.policy.queue import Bound, Load
from contracts.deadline import Deadline
from contracts.errors import DeadlineExceeded, Failure, Overloaded

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests, how many bytes of them, and for how long each, may wait."""

    per_version: Bound
    in_all: Bound
    wait_s: float


@dataclass(frozen=True, slots=True)
class AdmissionFacts:
    """What is known when a request of `nbytes` arrives."""

    free_slots: int
    nbytes: int
    queued: Load
    queued_in_all: Load
    limits: QueueLimits
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class Admit:
    """A slot is free and nobody waits before this request."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait, no longer than until then (monotonic)."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse, with this."""

    failure: Failure


Admission = Admit | Hold | Shed


def decide(facts: AdmissionFacts, now: float) -> Admission:
    """First reason wins: missed deadline, a free slot, a full queue; the first in line is never overtaken."""
    if facts.deadline.passed(now):
        return Shed(DeadlineExceeded(0.0, "admitting"))
    if facts.free_slots > 0 and facts.queued.entries == 0:
        return Admit()
    limits = facts.limits
    if not facts.queued.fits(facts.nbytes, limits.per_version):
        return Shed(Overloaded("the queue of this model", limits.per_version.entries, RETRY_AFTER_S))
    if not facts.queued_in_all.fits(facts.nbytes, limits.in_all):
        return Shed(Overloaded("the queue", limits.in_all.entries, RETRY_AFTER_S))
    return Hold(min(facts.deadline.at_s, now + limits.wait_s))
