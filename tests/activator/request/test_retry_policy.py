"""Retry policy: which failures are retried, when, and that a retry budget never exceeds its refill."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.request.retry_policy import (
    Retry,
    RetryBudgets,
    RetryLimits,
    RetryState,
    Withheld,
    decide,
    record_failure,
)

LIMITS = RetryLimits()


@pytest.mark.parametrize(
    ("tried", "remaining_s", "draw", "want"),
    [
        pytest.param(RetryState(lost=1), 9.0, 0.5, Retry(0.0125), id="the first pause is drawn from 25 ms"),
        pytest.param(RetryState(lost=1), 9.0, 0.0, Retry(0.0), id="full jitter begins at nothing"),
        pytest.param(RetryState(lost=1, refused=2), 9.0, 0.5, Retry(0.05), id="each range is twice the one before"),
        pytest.param(RetryState(refused=7), 9.0, 0.5, Retry(0.5), id="the longest range is a second"),
        pytest.param(RetryState(refused=8), 9.0, 0.5, Withheld.TRIES, id="eight attempts are enough"),
        pytest.param(RetryState(lost=2, refused=5), 9.0, 0.5, Retry(0.5), id="two of them may have been lost"),
        pytest.param(RetryState(lost=3), 9.0, 0.5, Withheld.TRIES, id="a third lost replica ends the retries"),
        pytest.param(RetryState(refused=7), 0.5, 0.5, Withheld.DEADLINE, id="a pause that outlasts the deadline"),
        pytest.param(RetryState(refused=7), 0.51, 0.5, Retry(0.5), id="a pause that ends just too late"),
        pytest.param(RetryState(lost=1), 0.0, 0.0, Withheld.DEADLINE, id="no time at all"),
    ],
)
def test_retry_is_decided_by_tries_deadline_and_time(
    tried: RetryState, remaining_s: float, draw: float, want: Retry | Withheld
) -> None:
    assert decide(replace(tried, until_s=100.0), 10.0, remaining_s, draw, LIMITS) == want


@pytest.mark.parametrize(
    ("now_s", "want"),
    [
        pytest.param(99.4, Retry(0.5), id="a pause that ends in time"),
        pytest.param(99.5, Withheld.TIME, id="a pause that ends just too late"),
        pytest.param(101.0, Withheld.TIME, id="an attempt that took longer"),
    ],
)
def test_pauses_end_within_the_time_since_the_first_failure(now_s: float, want: Retry | Withheld) -> None:
    """The bound holds whatever time the deadline leaves."""
    assert decide(RetryState(refused=7, until_s=100.0), now_s, 600.0, 0.5, LIMITS) == want


@pytest.mark.parametrize(
    ("tried", "lost", "sent_s", "want"),
    [
        pytest.param(RetryState(), True, 19.0, RetryState(1, 0, 25.0), id="the first failure starts the time"),
        pytest.param(RetryState(1, 0, 23.0), False, 19.0, RetryState(1, 1, 23.0), id="the next failure does not"),
        pytest.param(
            RetryState(1, 1, 18.0), True, 17.0, RetryState(2, 1, 18.0), id="nor does a long attempt sent in time"
        ),
        pytest.param(
            RetryState(1, 0, 18.0), True, 19.0, RetryState(2, 0, 25.0), id="an attempt after a start starts it again"
        ),
    ],
)
def test_failure_count_and_retry_deadline_are_updated(
    tried: RetryState, lost: bool, sent_s: float, want: RetryState
) -> None:
    """The time is 20 s, and retries have five seconds."""
    assert record_failure(tried, is_lost=lost, sent_s=sent_s, now_s=20.0, limits=LIMITS) == want


@pytest.mark.parametrize(
    ("requests", "spent", "pause_s", "want"),
    [
        pytest.param(0, 0, 0.0, 10, id="a quiet version has ten at once"),
        pytest.param(100, 0, 0.0, 20, id="a busy version has a tenth of its requests more"),
        pytest.param(0, 10, 0.0, 0, id="spent retries are gone"),
        pytest.param(0, 10, 1.1, 1, id="a second adds one"),
        pytest.param(0, 10, 1e6, 10, id="a long pause adds no more than ten"),
        pytest.param(10_000, 0, 1e6, 10, id="unused retries expire"),
    ],
)
def test_retry_budget_follows_requests_and_time(requests: int, spent: int, pause_s: float, want: int) -> None:
    """After so many requests, retries and seconds."""
    budgets = RetryBudgets[str](LIMITS)
    for _ in range(requests):
        budgets.record_request("a", 0.0)
    assert all(budgets.try_spend("a", 0.0) for _ in range(spent))
    assert _drain(budgets, "a", pause_s) == want


def test_budgets_are_apart_and_bounded() -> None:
    """An empty budget does not affect another one. The least recently used budget is forgotten."""
    budgets = RetryBudgets[int](RetryLimits(max_budgets=3))
    assert _drain(budgets, 0, 0.0) == 10
    assert budgets.try_spend(1, 0.0)
    for number in range(100):
        assert not budgets.try_spend(0, 0.0)
        budgets.record_request(number + 2, 0.0)
        budgets.check_integrity()


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "spend", "spend", "wait"]), st.floats(0, 30, allow_nan=False)), max_size=200
)


@given(STEPS)
def test_retries_are_bounded_by_what_was_asked(steps: list[tuple[str, float]]) -> None:
    """At most ten retries, a tenth of the requests, and one per second. A second without a retry always allows one."""
    budgets, now_s, asked, spent, refused_s = RetryBudgets[str](LIMITS), 0.0, 0, 0, 0.0
    for what, seconds in steps:
        if what == "ask":
            asked += 1
            budgets.record_request("a", now_s)
        elif what == "wait":
            now_s += seconds
        elif budgets.try_spend("a", now_s):
            spent += 1
            refused_s = now_s
        else:
            assert now_s - refused_s < 1.1, "a second without a retry, and none is left"
        budgets.check_integrity()
        assert spent <= 10 + asked * LIMITS.retries_per_request + now_s * LIMITS.retries_per_s + 1e-6


def _drain(budgets: RetryBudgets[str] | RetryBudgets[int], whose: object, now_s: float) -> int:
    count = 0
    while count < 10_000 and budgets.try_spend(whose, now_s):  # type: ignore[arg-type]
        count += 1
    return count
