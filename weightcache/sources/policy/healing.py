"""Where the next copy of an object comes from, and when it is given up. Pure: others read, verify and tell.

Sources are asked in order. A copy that is wrong or unreadable sends the load on to the next one; a source may be asked
more than once, because a bad read is not yet a bad object. What is refused, the last source decides: it is where
versions live, all others hold copies of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Failure


class ReadOutcome(StrEnum):
    """What became of one read of one copy."""

    WHOLE = "whole"  # as long as it should be; good where it is verified, too
    VERIFIED = "verified"  # as it should be: the source compared it with the digest already
    ABSENT = "absent"  # the source has none, and knew it
    AWAY = "away"  # the source did not answer: says nothing about its copy
    DIGEST = "digest"  # other bytes than the digest's
    LENGTH = "length"  # longer or shorter than it should be
    SHORT = "short"  # it ended before its length
    UNREADABLE = "unreadable"  # the medium gave an error
    MISSING = "missing"  # it was there, and is not any more


GOOD_OUTCOMES: Final = frozenset({ReadOutcome.WHOLE, ReadOutcome.VERIFIED})
FAULTS: Final = frozenset(
    {ReadOutcome.DIGEST, ReadOutcome.LENGTH, ReadOutcome.SHORT, ReadOutcome.UNREADABLE, ReadOutcome.MISSING}
)
ABSENT_OUTCOMES: Final = frozenset({ReadOutcome.ABSENT, ReadOutcome.MISSING})


@dataclass(frozen=True, slots=True)
class SourceRule:
    """A source's name, and how often a faulty copy of it is read before the next one is asked."""

    tier: str
    attempts: int


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """One read. `failure` is what a source that is away said."""

    tier: str
    outcome: ReadOutcome
    failure: Failure | None = None

    @property
    def is_fault(self) -> bool:
        """Whether something was wrong with the copy itself."""
        return self.outcome in FAULTS


@dataclass(frozen=True, slots=True)
class TrySource:
    """Read from the source at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes are right; they came from this tier."""

    tier: str


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """No source has a good copy now. This trial says why: its copy is faulty, it has none, or it is away."""

    decisive: ReadAttempt


HealingStep = TrySource | Fetched | Unrecoverable


def choose_step(rules: Sequence[SourceRule], trials: Sequence[ReadAttempt]) -> HealingStep:
    """What comes after these trials, oldest first; there is at least one rule."""
    if trials and trials[-1].outcome in GOOD_OUTCOMES:
        return Fetched(trials[-1].tier)
    for position, rule in enumerate(rules):
        own = [trial for trial in trials if trial.tier == rule.tier]
        if not own or (own[-1].is_fault and len(own) < rule.attempts):
            return TrySource(position)
    return Unrecoverable(_decisive(trials))


def _decisive(trials: Sequence[ReadAttempt]) -> ReadAttempt:
    """The last source's word counts; where it has no copy, one that is away may have it."""
    last = trials[-1]
    if last.outcome in ABSENT_OUTCOMES:
        return next((trial for trial in reversed(trials) if trial.outcome is ReadOutcome.AWAY), last)
    return last
