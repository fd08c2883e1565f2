"""Degradation policy: which steps apply to a wait, which refusals allow a step, and hysteresis near a threshold."""

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
STEPS = (CAP, SMALL, LAST)


@pytest.mark.parametrize(
    ("wait_s", "priority_class", "want"),
    [
        pytest.param(0.0, PriorityClass.INTERACTIVE, (), id="no wait, no step"),
        pytest.param(1.9, PriorityClass.INTERACTIVE, (), id="just below the first step"),
        pytest.param(2.0, PriorityClass.INTERACTIVE, (CAP,), id="the first step"),
        pytest.param(9.0, PriorityClass.INTERACTIVE, (SMALL, CAP), id="the second step, then the first"),
        pytest.param(1e9, PriorityClass.INTERACTIVE, (SMALL, CAP), id="a step without a wait is for refusals only"),
        pytest.param(1.0, PriorityClass.STANDARD, (CAP,), id="standard requests degrade earlier"),
        pytest.param(0.5, PriorityClass.BATCH, (CAP,), id="batch requests degrade first"),
        pytest.param(0.4, PriorityClass.BATCH, (), id="a shorter wait degrades no batch request"),
    ],
)
def test_steps_apply_from_their_wait_on(
    wait_s: float, priority_class: PriorityClass, want: tuple[DegradationStep, ...]
) -> None:
    assert steps_for_wait(STEPS, wait_s, priority_class) == want


def test_output_cap_does_not_apply_to_a_cold_start() -> None:
    """A start takes as long for a short answer, so CapOutput does not apply to it."""
    assert steps_for_wait(STEPS, 9.0, PriorityClass.INTERACTIVE, is_start=True) == (SMALL,)
    assert steps_for_wait((), 9.0, PriorityClass.BATCH) == ()


@pytest.mark.parametrize(
    ("status", "code", "want"),
    [
        pytest.param(503, "overloaded", True, id="the queue is full"),
        pytest.param(503, "breaker_open", True, id="its starts fail"),
        pytest.param(503, "deadline_too_short", True, id="its deadline is too short"),
        pytest.param(500, "chunk_corrupt", True, id="its start failed"),
        pytest.param(502, "replica_lost", True, id="its replica is gone"),
        pytest.param(504, "deadline_exceeded", True, id="the queue took too long"),
        pytest.param(500, "internal", False, id="a defect"),
        pytest.param(429, "rate_limit_exceeded", False, id="a tenant's limit"),
        pytest.param(400, "limit_exceeded", False, id="an invalid request"),
    ],
)
def test_busy_and_unavailable_refusals_are_recoverable(status: int, code: str, want: bool) -> None:
    assert is_recoverable(status, code) is want


def test_cap_output_helps_only_against_overload() -> None:
    """A shorter answer fits into a queue full of tokens. It does not help while no replica can serve."""
    assert [helps_against(CAP, code) for code in ("overloaded", "breaker_open")] == [True, False]
    assert [helps_against(LAST, code) for code in ("overloaded", "breaker_open")] == [True, True]


def test_longer_wait_counts_at_once_and_shorter_one_later() -> None:
    """A wait counts as long as it was until less than half of it was seen for HOLD_S."""
    waits: WaitHysteresis[str] = WaitHysteresis()
    assert waits.record_wait("m", 0.0, 0.0) == 0.0
    assert len(waits) == 0, "no entry for a wait of zero"
    assert waits.record_wait("m", 2.0, 1.0) == 2.0
    assert waits.record_wait("m", 8.0, 1.1) == 8.0
    assert waits.record_wait("m", 5.0, 3.0) == 8.0, "more than half"
    assert waits.record_wait("m", 4.0, 3.0 + HOLD_S - 0.1) == 8.0, "not for long enough"
    assert waits.record_wait("other", 1.0, 3.0) == 1.0
    assert waits.record_wait("m", 4.0, 3.0 + HOLD_S) == 4.0
    assert waits.record_wait("m", 0.0, 3.0 + 2 * HOLD_S) == 0.0
    assert len(waits) == 1


def test_waits_are_bounded_in_number() -> None:
    """The oldest entry is dropped first."""
    waits: WaitHysteresis[int] = WaitHysteresis()
    for each in range(MAX_WAITS + 10):
        waits.record_wait(each, 1.0, 0.0)
    assert len(waits) == MAX_WAITS


@given(st.lists(st.floats(min_value=RELIEF_RATIO + 0.01, max_value=1.0), min_size=1, max_size=200))
def test_wait_near_a_step_does_not_oscillate(swings: list[float]) -> None:
    """A wait between half and all of a step's threshold keeps the step. Control: without hysteresis it changes."""
    waits: WaitHysteresis[str] = WaitHysteresis()
    steps = [waits.record_wait("m", 8.0 * swing, at * 0.3) for at, swing in enumerate([1.0, *swings])]
    assert {steps_for_wait(STEPS, wait_s, PriorityClass.INTERACTIVE) for wait_s in steps} == {(SMALL, CAP)}
    bare = [8.0, 7.9, 8.0, 7.9]
    assert len({steps_for_wait(STEPS, wait_s, PriorityClass.INTERACTIVE) for wait_s in bare}) == 2
