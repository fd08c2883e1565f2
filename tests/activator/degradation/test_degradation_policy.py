"""The ladder's steps: which a wait asks for, which a refusal, and that nobody goes up and down at an edge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.degradation.degradation_policy import (
    HOLD_S,
    MAX_WAITS,
    RELIEF_RATIO,
    WaitHysteresis,
    helps_against,
    is_recoverable,
    steps_for_wait,
)
from activator.queue.policy.queued_request import PriorityClass
from kelvin.contracts.serving.degradation_steps import CapOutput, DegradationStep, Fallback

CAP = CapOutput(tokens=64, wait_s=2)
SMALL = Fallback(model="small", wait_s=8)
LAST = Fallback(model="tiny")
LADDER = (CAP, SMALL, LAST)


@pytest.mark.parametrize(
    ("wait_s", "priority_class", "want"),
    [
        pytest.param(0.0, PriorityClass.INTERACTIVE, (), id="no wait, no step"),
        pytest.param(1.9, PriorityClass.INTERACTIVE, (), id="nearly the first"),
        pytest.param(2.0, PriorityClass.INTERACTIVE, (CAP,), id="the first"),
        pytest.param(
            9.0, PriorityClass.INTERACTIVE, (SMALL, CAP), id="the second, and the first where that is no help"
        ),
        pytest.param(1e9, PriorityClass.INTERACTIVE, (SMALL, CAP), id="the last is for refusals alone"),
        pytest.param(1.0, PriorityClass.STANDARD, (CAP,), id="who is less urgent steps down earlier"),
        pytest.param(0.5, PriorityClass.BATCH, (CAP,), id="and who is least urgent first"),
        pytest.param(0.4, PriorityClass.BATCH, (), id="not for nothing"),
    ],
)
def test_steps_apply_from_their_wait_on(
    wait_s: float, priority_class: PriorityClass, want: tuple[DegradationStep, ...]
) -> None:
    """By the wait that is expected."""
    assert steps_for_wait(LADDER, wait_s, priority_class) == want


def test_a_start_is_not_made_shorter_by_a_shorter_answer() -> None:
    """So that step is none for who waits for one."""
    assert steps_for_wait(LADDER, 9.0, PriorityClass.INTERACTIVE, is_start=True) == (SMALL,)
    assert steps_for_wait((), 9.0, PriorityClass.BATCH) == ()


@pytest.mark.parametrize(
    ("status", "code", "want"),
    [
        pytest.param(503, "overloaded", True, id="the queue is full"),
        pytest.param(503, "breaker_open", True, id="its starts fail"),
        pytest.param(503, "deadline_too_short", True, id="it would be late"),
        pytest.param(500, "chunk_corrupt", True, id="its start failed"),
        pytest.param(502, "replica_lost", True, id="its replica is gone"),
        pytest.param(504, "deadline_exceeded", True, id="the queue took too long"),
        pytest.param(500, "internal", False, id="a defect is none"),
        pytest.param(429, "rate_limit_exceeded", False, id="a tenant's limit is none"),
        pytest.param(400, "limit_exceeded", False, id="nor is what was asked wrongly"),
    ],
)
def test_busy_and_unavailable_refusals_are_recoverable(status: int, code: str, want: bool) -> None:
    """What is no fault of the request."""
    assert is_recoverable(status, code) is want


def test_cap_output_helps_only_against_overload() -> None:
    """A shorter answer fits into a queue that is full of tokens; it is no help where nobody answers."""
    assert [helps_against(CAP, code) for code in ("overloaded", "breaker_open")] == [True, False]
    assert [helps_against(LAST, code) for code in ("overloaded", "breaker_open")] == [True, True]


def test_a_longer_wait_counts_at_once_a_shorter_one_later() -> None:
    """As long as more than half of it is seen now and then, it is the same pressure."""
    waits: WaitHysteresis[str] = WaitHysteresis()
    assert waits.seen("m", 0.0, 0.0) == 0.0
    assert len(waits) == 0, "nothing is kept of who waits for nothing"
    assert waits.seen("m", 2.0, 1.0) == 2.0
    assert waits.seen("m", 8.0, 1.1) == 8.0
    assert waits.seen("m", 5.0, 3.0) == 8.0, "more than half"
    assert waits.seen("m", 4.0, 3.0 + HOLD_S - 0.1) == 8.0, "not for long enough"
    assert waits.seen("other", 1.0, 3.0) == 1.0
    assert waits.seen("m", 4.0, 3.0 + HOLD_S) == 4.0
    assert waits.seen("m", 0.0, 3.0 + 2 * HOLD_S) == 0.0
    assert len(waits) == 1


def test_waits_are_bounded_in_number() -> None:
    """Who was first is forgotten first."""
    waits: WaitHysteresis[int] = WaitHysteresis()
    for each in range(MAX_WAITS + 10):
        waits.seen(each, 1.0, 0.0)
    assert len(waits) == MAX_WAITS


@given(st.lists(st.floats(min_value=RELIEF_RATIO + 0.01, max_value=1.0), min_size=1, max_size=200))
def test_wait_near_a_step_does_not_oscillate(swings: list[float]) -> None:
    """Whatever a wait does between its half and its whole, who was over the edge stays there. Without the memory it
    would go up and down: the control.
    """
    waits: WaitHysteresis[str] = WaitHysteresis()
    steps = [waits.seen("m", 8.0 * swing, at * 0.3) for at, swing in enumerate([1.0, *swings])]
    assert {steps_for_wait(LADDER, wait_s, PriorityClass.INTERACTIVE) for wait_s in steps} == {(SMALL, CAP)}
    bare = [8.0, 7.9, 8.0, 7.9]
    assert len({steps_for_wait(LADDER, wait_s, PriorityClass.INTERACTIVE) for wait_s in bare}) == 2
