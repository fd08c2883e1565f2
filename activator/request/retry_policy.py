"""Decide whether a request that failed before its client had a byte is tried again, after which pause, and who pays.

A budget of a tenant and version is a bucket of retries. Each of their requests adds a tenth of a retry, and every
second adds a whole one. What nobody uses fades, so a bucket holds what `memory_s` brought. So retries never double the
load of an outage, and a quiet model is retried all the same (Finagle's RetryBudget, with a bucket that leaks instead of
its window). This is no `kelvin.contracts.token_bucket`: requests fill it, too, and it loses a share of its level, not a
fixed rate. Pauses are drawn from the whole of their range ("full jitter", Brooker, "Exponential backoff and jitter",
2015): those who failed together do not come back together.

One time bounds the pauses and the waits for another replica, resting ones included: what fails for longer than a moment
is told, not waited for. A start is: it takes what it takes.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from math import exp
from typing import Final, Generic, TypeVar

from kelvin.contracts.backoff import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How much more work than was asked for may be made."""

    share: float = 0.1  # of requests
    per_s: float = 1.0  # however few there are
    memory_s: float = 10.0  # for which what was not used is kept
    first_s: float = 0.025
    longest_s: float = 1.0
    lost: int = 3  # replicas that one request may be lost with: it may be what ends them
    tries: int = 8  # in all
    within_s: float = 5.0  # of its first failure it is sent again, or never, but for who waits for a start
    budgets: int = 4096  # that are kept; the one that was used longest ago is forgotten


LIMITS: Final = RetryLimits()


class Withheld(StrEnum):
    """Why a request is not tried again."""

    TRIES = "tries"  # often enough already
    DEADLINE = "deadline"  # the pause outlasts it
    BUDGET = "budget"
    TIME = "time"  # since its first failure is over


@dataclass(frozen=True, slots=True)
class Retry:
    """After so long."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class RetryState:
    """What has become of a request so far: replicas that were lost with it, and those that took nothing of it; until
    when it may be sent again (monotonic seconds), once one of both has happened.
    """

    lost: int = 0
    refused: int = 0
    until_s: float | None = None


def failed(tried: RetryState, *, lost: bool, sent_s: float, now_s: float, limits: RetryLimits) -> RetryState:
    """Count one more failure of a request that was sent at `sent_s`, and return the sum.

    A request that was sent after `until_s` had waited for a start. Earlier failures say nothing about that, so its time
    begins anew.
    """
    until_s = tried.until_s
    if until_s is None or sent_s > until_s:
        until_s = now_s + limits.within_s
    return RetryState(tried.lost + lost, tried.refused + (not lost), until_s)


def decide(tried: RetryState, now_s: float, remaining_s: float, draw: float, limits: RetryLimits) -> Retry | Withheld:
    """For a request that was just lost or refused; `draw` is of [0, 1). The budget is still to be asked."""
    count = tried.lost + tried.refused
    if count >= limits.tries or tried.lost >= limits.lost:
        return Withheld.TRIES
    pause_s = draw * ExponentialBackoff(limits.first_s, limits.longest_s).after(count)
    if pause_s >= remaining_s:
        return Withheld.DEADLINE
    assert tried.until_s is not None, "nothing has failed"
    return Retry(pause_s) if now_s + pause_s < tried.until_s else Withheld.TIME


Of = TypeVar("Of", bound=Hashable)


@dataclass(slots=True)
class _Bucket:
    retries: float
    at_s: float


class RetryBudgets(Generic[Of]):
    """One budget for each tenant and version. Times are seconds of one clock that never steps back."""

    def __init__(self, limits: RetryLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[Of, _Bucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets known={len(self._buckets)}>"

    def asked(self, whose: Of, now_s: float) -> None:
        """A request came: not a retry."""
        self._settled(whose, now_s).retries += self._limits.share

    def try_spend(self, whose: Of, now_s: float) -> bool:
        """Take one retry out; False where there is none."""
        bucket = self._settled(whose, now_s)
        if bucket.retries < 1.0:
            return False
        bucket.retries -= 1.0
        return True

    def check_integrity(self) -> None:
        """No bucket owes anything, none is kept beyond the bound."""
        assert all(bucket.retries >= 0.0 for bucket in self._buckets.values())
        assert len(self._buckets) <= self._limits.budgets

    def _settled(self, whose: Of, now_s: float) -> _Bucket:
        """As it is now: between two events it goes towards what `per_s` alone keeps in it."""
        limits = self._limits
        quiet = limits.per_s * limits.memory_s
        bucket = self._buckets.get(whose)
        if bucket is None:
            if len(self._buckets) >= limits.budgets:
                self._buckets.popitem(last=False)
            bucket = self._buckets[whose] = _Bucket(quiet, now_s)
            return bucket
        bucket.retries = quiet + (bucket.retries - quiet) * exp((bucket.at_s - now_s) / limits.memory_s)
        bucket.at_s = now_s
        self._buckets.move_to_end(whose)
        return bucket
