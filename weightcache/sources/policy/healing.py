"""Decide where the next copy of an object comes from, and when to give up. Pure: callers read, verify and report.

Sources are tried in order. After a faulty or unreadable copy the next source is tried. A source may be tried more than
once, because one bad read does not prove a bad object. The last source decides about a refusal: versions live there,
and all other sources have copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Failure


class ReadOutcome(StrEnum):
    """The result of one read of one copy."""

    WHOLE = "whole"  # right length; verified by the caller
    VERIFIED = "verified"  # the source compared it with the digest already
    ABSENT = "absent"  # the source has no copy, and knew that
    AWAY = "away"  # the source did not answer, so its copy is not judged
    DIGEST = "digest"  # bytes that do not match the digest
    LENGTH = "length"  # wrong length
    SHORT = "short"  # it ended before its length
    UNREADABLE = "unreadable"  # the medium reported an error
    MISSING = "missing"  # a known copy that no longer exists


GOOD_OUTCOMES: Final = frozenset({ReadOutcome.WHOLE, ReadOutcome.VERIFIED})
FAULTS: Final = frozenset(
    {ReadOutcome.DIGEST, ReadOutcome.LENGTH, ReadOutcome.SHORT, ReadOutcome.UNREADABLE, ReadOutcome.MISSING}
)
UNREAD_OUTCOMES: Final = frozenset({ReadOutcome.ABSENT, ReadOutcome.AWAY})
ABSENT_OUTCOMES: Final = frozenset({ReadOutcome.ABSENT, ReadOutcome.MISSING})


@dataclass(frozen=True, slots=True)
class SourceRule:
    """A source's name, and how often its copy is read before the next source is tried."""

    tier: str
    attempts: int


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """One read. `failure` is the failure that an unavailable source reported."""

    tier: str
    outcome: ReadOutcome
    failure: Failure | None = None

    @property
    def is_fault(self) -> bool:
        """Return whether the copy itself was faulty."""
        return self.outcome in FAULTS


@dataclass(frozen=True, slots=True)
class TrySource:
    """Read from the source at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes are correct; they came from this tier."""

    tier: str


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """No source has a good copy now. `decisive` says why: a faulty copy, no copy, or an unavailable source."""

    decisive: ReadAttempt


HealingStep = TrySource | Fetched | Unrecoverable


def choose_step(rules: Sequence[SourceRule], attempts: Sequence[ReadAttempt]) -> HealingStep:
    """Return the next step after these attempts, oldest first. There must be at least one rule."""
    if attempts and attempts[-1].outcome in GOOD_OUTCOMES:
        return Fetched(attempts[-1].tier)
    for position, rule in enumerate(rules):
        own_attempts = [attempt for attempt in attempts if attempt.tier == rule.tier]
        if not own_attempts or (own_attempts[-1].is_fault and len(own_attempts) < rule.attempts):
            return TrySource(position)
    return Unrecoverable(_find_decisive(attempts))


def _find_decisive(attempts: Sequence[ReadAttempt]) -> ReadAttempt:
    """Return the last source's attempt. If it has no copy, return one of an unavailable source, which may have it."""
    last = attempts[-1]
    if last.outcome in ABSENT_OUTCOMES:
        return next((attempt for attempt in reversed(attempts) if attempt.outcome is ReadOutcome.AWAY), last)
    return last
