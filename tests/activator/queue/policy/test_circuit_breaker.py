"""Circuit breaker policy: when it opens, for how long, and that one trial runs at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.queue.policy.circuit_breaker import BreakerLimits, BreakerState, CircuitBreaker

LIMITS = BreakerLimits(3, first_s=1.0, longest_s=8.0)


@pytest.mark.parametrize(
    ("failures_s", "at_once", "now_s", "want"),
    [
        pytest.param([0.0, 0.0], False, 0.0, BreakerState.CLOSED, id="two failures in a row don't open it"),
        pytest.param([0.0, 0.0, 0.0], False, 0.9, BreakerState.OPEN, id="three failures in a row open it"),
        pytest.param([0.0], True, 0.9, BreakerState.OPEN, id="one failure with at_once opens it"),
        pytest.param([0.0, 0.0, 0.0], False, 1.0, BreakerState.HALF_OPEN, id="it is open for a second"),
        pytest.param(
            [0.0, 0.0, 0.0, 0.5, 0.9],
            False,
            1.0,
            BreakerState.HALF_OPEN,
            id="failures while it is open don't extend it",
        ),
        pytest.param(
            [0.0, 0.0, 0.0, 1.0], False, 2.9, BreakerState.OPEN, id="a failed trial opens it for twice as long"
        ),
        pytest.param([0.0, 0.0, 0.0, 1.0], False, 3.0, BreakerState.HALF_OPEN, id="and for no longer"),
        pytest.param(
            [0.0] * 3 + [9.0, 99.0, 999.0, 9999.0],
            False,
            10_006.9,
            BreakerState.OPEN,
            id="the time doubles up to the bound",
        ),
        pytest.param(
            [0.0] * 3 + [9.0, 99.0, 999.0, 9999.0],
            False,
            10_007.0,
            BreakerState.HALF_OPEN,
            id="and never exceeds the bound",
        ),
    ],
)
def test_breaker_opens_after_failures_in_a_row(
    failures_s: list[float], at_once: bool, now_s: float, want: BreakerState
) -> None:
    """Failures happen at these times."""
    breaker = CircuitBreaker(LIMITS)
    for at_s in failures_s:
        breaker.record_failure(at_s, at_once=at_once)
    assert breaker.state(now_s) is want


def test_half_open_breaker_admits_one_trial() -> None:
    """A request that leaves late does not make room for a second trial."""
    breaker, first, second, third = CircuitBreaker(LIMITS), object(), object(), object()
    breaker.record_failure(0.0, at_once=True)
    assert not breaker.allows_request(0.5)
    assert breaker.remaining_s(0.25) == 0.75
    breaker.enter(first, 1.0)
    assert not breaker.allows_request(1.0)
    breaker.leave(first)
    breaker.enter(second, 1.0)
    breaker.leave(first)
    assert not breaker.allows_request(1.0), "the second one still tries"
    breaker.record_failure(1.0)
    breaker.enter(third, 3.0)
    breaker.leave(second)
    assert not breaker.allows_request(3.0), "the third one still tries"
    assert repr(breaker) == "<CircuitBreaker half_open failures=1 rest=2>"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "enter", "leave", "fail", "enough", "wait", "wait"]),
        st.integers(0, 9),
    ),
    min_size=10,
    max_size=80,
)


@given(STEPS)
@settings(max_examples=200)
def test_half_open_breaker_never_admits_two_trials(steps: list[tuple[str, int]]) -> None:
    """This holds for any order of events. Every open period ends: then a trial is admitted."""
    breaker, now_s, inside, trying = CircuitBreaker(LIMITS), 0.0, list[object](), set[int]()
    for what, which in steps:
        if what == "enter" and breaker.allows_request(now_s):
            request = object()
            if breaker.state(now_s) is BreakerState.HALF_OPEN:
                assert not trying, "two try at a time"
                trying = {id(request)}
            breaker.enter(request, now_s)
            inside.append(request)
        elif what == "leave" and inside:
            request = inside.pop(which % len(inside))
            trying.discard(id(request))
            breaker.leave(request)
        elif what in ("fail", "enough"):
            was = breaker.state(now_s)
            opened = breaker.record_failure(now_s, at_once=what == "enough")
            assert opened or was is BreakerState.OPEN or (was is BreakerState.CLOSED and what == "fail")
            if opened:
                trying.clear()
                assert 0 < breaker.remaining_s(now_s) <= LIMITS.longest_s
        else:
            now_s += which
        assert breaker.has_trial_request == bool(trying)
        if breaker.state(now_s) is BreakerState.OPEN:
            assert not breaker.allows_request(now_s)
            assert breaker.remaining_s(now_s) > 0
        elif not trying:
            assert breaker.allows_request(now_s)
