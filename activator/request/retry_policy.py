"""Decide when and how often a request that failed before its client received a byte is retried.

Each tenant and version has a retry budget, a bucket. Each request adds a tenth of a retry, and each second adds one.
Unused retries decay, so a bucket holds what `memory_s` brought. So retries never double the load of an outage, and a
quiet model still gets retries (Finagle's RetryBudget, with a leaking bucket instead of its window).
`kelvin.contracts.token_bucket` does not fit: requests fill this bucket, too, and it loses a share of its level instead
of a fixed rate.

Pauses have full jitter (Brooker, "Exponential backoff and jitter", 2015): requests that failed together do not return
together. One time limit, `within_s`, bounds the pauses and the waits for another replica, including replicas with an
open breaker. A longer outage is reported to the client. Only the wait for a start may take longer.
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
    """Bounds on the extra work of retries."""

    retries_per_request: float = 0.1  # retries per request
    retries_per_s: float = 1.0  # retries per second, without any request
    memory_s: float = 10.0  # decay time of unused retries
    first_s: float = 0.025
    longest_s: float = 1.0
    max_lost: int = 3  # lost replicas per request: the request may be what kills them
    max_attempts: int = 8  # attempts in total
    within_s: float = 5.0  # a retry must be sent within this time of the first failure, except after a start
    max_budgets: int = 4096  # buckets kept; the least recently used is dropped


LIMITS: Final = RetryLimits()


class Withheld(StrEnum):
    """Why a request is not tried again."""

    TRIES = "tries"  # enough attempts were made
    DEADLINE = "deadline"  # the pause would outlast it
    BUDGET = "budget"
    TIME = "time"  # `within_s` is over


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry after a pause."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class RetryState:
    """The failures of a request so far: lost replicas, and replicas that refused it. `until_s` is when the time for
    retries ends (monotonic seconds), after a first failure.
    """

    lost: int = 0
    refused: int = 0
    until_s: float | None = None


def record_failure(
    retry_state: RetryState, *, is_lost: bool, sent_s: float, now_s: float, limits: RetryLimits
) -> RetryState:
    """Count one more failure of a request that was sent at `sent_s`, and return the new state.

    A request that was sent after `until_s` had waited for a start. Earlier failures say nothing about that, so its time
    for retries starts again.
    """
    until_s = retry_state.until_s
    if until_s is None or sent_s > until_s:
        until_s = now_s + limits.within_s
    return RetryState(retry_state.lost + is_lost, retry_state.refused + (not is_lost), until_s)


def decide(
    retry_state: RetryState, now_s: float, remaining_s: float, draw: float, limits: RetryLimits
) -> Retry | Withheld:
    """Decide about a request that was just lost or refused, before the budget is checked. `draw` is in [0, 1)."""
    count = retry_state.lost + retry_state.refused
    if count >= limits.max_attempts or retry_state.lost >= limits.max_lost:
        return Withheld.TRIES
    pause_s = draw * ExponentialBackoff(limits.first_s, limits.longest_s).delay_s(count)
    if pause_s >= remaining_s:
        return Withheld.DEADLINE
    assert retry_state.until_s is not None, "nothing has failed"
    return Retry(pause_s) if now_s + pause_s < retry_state.until_s else Withheld.TIME


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Bucket:
    retries: float
    at_s: float


class RetryBudgets(Generic[K]):
    """One budget per tenant and version. Times are seconds of one monotonic clock."""

    def __init__(self, limits: RetryLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[K, _Bucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets known={len(self._buckets)}>"

    def record_request(self, key: K, now_s: float) -> None:
        """Add to the budget for a new request, not a retry."""
        self._decayed_bucket(key, now_s).retries += self._limits.retries_per_request

    def try_spend(self, key: K, now_s: float) -> bool:
        """Take one retry. Return False if there is none."""
        bucket = self._decayed_bucket(key, now_s)
        if bucket.retries < 1.0:
            return False
        bucket.retries -= 1.0
        return True

    def check_integrity(self) -> None:
        """Assert that no bucket is negative, and that their number is bounded."""
        assert all(bucket.retries >= 0.0 for bucket in self._buckets.values())
        assert len(self._buckets) <= self._limits.max_budgets

    def _decayed_bucket(self, key: K, now_s: float) -> _Bucket:
        """Return the bucket as of now. Between events it decays towards the level that `retries_per_s` alone would
        keep.
        """
        limits = self._limits
        quiet = limits.retries_per_s * limits.memory_s
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= limits.max_budgets:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = _Bucket(quiet, now_s)
            return bucket
        bucket.retries = quiet + (bucket.retries - quiet) * exp((bucket.at_s - now_s) / limits.memory_s)
        bucket.at_s = now_s
        self._buckets.move_to_end(key)
        return bucket
