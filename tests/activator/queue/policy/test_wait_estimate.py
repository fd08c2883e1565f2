"""Wait estimates: throughput, start forecasts and start problems, and that nothing is claimed before it is known."""

from collections.abc import Callable
from functools import partial

import pytest

from activator.queue.policy.wait_estimate import (
    HALVING_ANSWERS,
    MIN_ANSWERS,
    OVERDUE_S,
    UNKNOWN,
    StartForecasts,
    Throughput,
    WaitEstimate,
    is_too_late,
    redact_for_caller,
    wait_s,
)
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.serving.start_forecast import Forecast, StartRow

KEY = VersionKey("t", "m", "v")
OTHER = VersionKey("t", "m", "w")
NAMES = {"tenant": "t", "model": "m", "version": "v"}
START = StartRow(start_ms=9000, **NAMES)
FORECAST = Forecast(tenant="t", model="m", version="v", ready_in_ms=4000)


def throughput_after(answers: int, each_s: float = 2.0) -> Throughput:
    """Return the throughput after so many sequential answers on one slot."""
    throughput, now = Throughput(), 50.0
    for _ in range(answers):
        throughput.record_grant(now)
        now += each_s
        throughput.record_release(now, 100, 100)
    return throughput


@pytest.mark.parametrize(
    ("answers", "slots", "want"),
    [
        pytest.param(0, 1, None, id="nothing was served"),
        pytest.param(MIN_ANSWERS - 1, 1, None, id="too few answers"),
        pytest.param(MIN_ANSWERS, 1, 50.0, id="a hundred tokens in two seconds"),
        pytest.param(MIN_ANSWERS, 4, 200.0, id="four slots are four times as fast"),
        pytest.param(HALVING_ANSWERS * 3, 1, 50.0, id="forgetting changes no mean"),
        pytest.param(MIN_ANSWERS, 0, None, id="without slots the rate is unknown"),
    ],
)
def test_throughput_is_tokens_per_slot_second(answers: int, slots: int, want: float | None) -> None:
    """Tokens divided by the seconds for which slots were held."""
    assert throughput_after(answers).tokens_per_s(slots) == (None if want is None else pytest.approx(want))


def test_idle_and_cancelled_slots_do_not_lower_throughput() -> None:
    """Two slots are held at once, then none for an hour. One is released at once, one is lost with its replica."""
    throughput = throughput_after(MIN_ANSWERS)
    throughput.record_grant(3600.0)
    throughput.record_grant(3600.0)
    throughput.record_release(3601.0, 50, 50)
    throughput.record_release(3601.0, 50, 50)
    assert throughput.tokens_per_s(1) == pytest.approx(50.0)
    throughput.record_grant(7200.0)
    throughput.record_release(7200.0, 50, 0)
    throughput.record_grant(7200.0)
    throughput.record_lost_slots(7200.0, 1)
    assert throughput.running == 0
    assert throughput.tokens_per_s(1) == pytest.approx(50.0)


def test_computed_tokens_are_measured_beside_estimates() -> None:
    """A tenth of the estimate is computed. The measure has tokens per slot second and the ratio to the estimate."""
    throughput, now = Throughput(), 50.0
    for answers in range(HALVING_ANSWERS * 3):
        assert (throughput.measured() is None) == (answers < MIN_ANSWERS)
        throughput.record_grant(now)
        now += 2.0
        throughput.record_release(now, 100, 10)
    assert throughput.measured() == pytest.approx((5.0, 0.1))
    throughput.record_grant(now)
    throughput.record_release(now, 100, 0)
    assert throughput.measured() == pytest.approx((5.0, 0.1)), "what had no answer says nothing"


def test_new_answers_outweigh_old_ones() -> None:
    """After a few hundred answers the old rate is forgotten."""
    throughput = throughput_after(HALVING_ANSWERS, each_s=20.0)
    assert throughput.tokens_per_s(1) == pytest.approx(5.0)
    now = 5000.0
    for _ in range(10 * HALVING_ANSWERS):
        throughput.record_grant(now)
        now += 2.0
        throughput.record_release(now, 100, 100)
    assert throughput.tokens_per_s(1) == pytest.approx(50.0, rel=0.1)


@pytest.mark.parametrize(
    ("stands", "starts_at", "now", "want"),
    [
        pytest.param(False, None, 100.0, None, id="nothing was said"),
        pytest.param(True, None, 100.0, 9.0, id="the duration of a start"),
        pytest.param(True, None, 5000.0, 9.0, id="the duration does not age"),
        pytest.param(True, 100.0, 101.0, 3.0, id="a running start has less time left"),
        pytest.param(False, 100.0, 101.0, 3.0, id="a running start without a known duration"),
        pytest.param(True, 100.0, 110.0, 0.0, id="an overdue start may end at any moment"),
        pytest.param(True, 100.0, 105.0 + OVERDUE_S, 9.0, id="a long overdue start is dropped"),
    ],
)
def test_start_forecast_is_per_version(stands: bool, starts_at: float | None, now: float, want: float | None) -> None:
    """Another version has no forecast."""
    starts = StartForecasts()
    if stands:
        starts.set_start_duration(KEY, START)
    if starts_at is not None:
        starts.set_forecast(KEY, FORECAST, starts_at)
    assert starts.wait_estimate(OTHER, now) == UNKNOWN
    assert starts.wait_estimate(KEY, now).remaining_s == want


def test_forecasts_end_with_replica_failure_or_snapshot() -> None:
    """A replica ends all of them, a failure its version's forecast, a snapshot what it may contradict."""
    starts = StartForecasts()
    starts.set_start_duration(KEY, START)
    starts.set_forecast(KEY, FORECAST, 0.0)
    starts.clear_failed_start("t", "w")
    assert starts.wait_estimate(KEY, 0.0).remaining_s == 4.0
    starts.clear_failed_start("t", "v")
    assert starts.wait_estimate(KEY, 0.0).remaining_s == 9.0
    starts.set_forecast(KEY, FORECAST, 0.0)
    starts.clear()
    assert starts.wait_estimate(KEY, 0.0).remaining_s == 4.0
    starts.set_start_duration(KEY, START)
    starts.clear_version(KEY)
    assert starts.wait_estimate(KEY, 0.0).remaining_s is None


@pytest.mark.parametrize(
    ("tokens", "throughput", "left_s", "want"),
    [
        pytest.param(10_000, None, 0.1, False, id="an unknown throughput refuses none"),
        pytest.param(0, 50.0, 0.1, False, id="no tokens before it"),
        pytest.param(100, 50.0, 2.0, False, id="just in time"),
        pytest.param(101, 50.0, 2.0, True, id="one token too many"),
    ],
)
def test_wait_beyond_the_remaining_time_is_too_late(
    tokens: int, throughput: float | None, left_s: float, want: bool
) -> None:
    """The wait is the tokens before the request divided by tokens per second."""
    assert is_too_late(wait_s(tokens, throughput), left_s) is want


@pytest.mark.parametrize(
    ("wait_estimate", "want"),
    [
        pytest.param(UNKNOWN, "", id="nothing is known"),
        pytest.param(WaitEstimate(1.26), " remaining_s=1.3", id="a queue"),
        pytest.param(WaitEstimate(0.0, 0, "host"), " remaining_s=0.0 tier=host bytes=0", id="no bytes to load"),
        pytest.param(WaitEstimate(9.0, 5, "nvme"), " remaining_s=9.0 tier=nvme bytes=5", id="five bytes from a disk"),
    ],
)
def test_wait_estimate_is_formatted_for_heartbeats(wait_estimate: WaitEstimate, want: str) -> None:
    assert wait_estimate.heartbeat_text() == want


def test_start_problem_stands_until_it_is_solved() -> None:
    """The problem is part of the estimate. A solution, a replica or a snapshot ends it."""
    starts = StartForecasts()
    problem = StartProblem(reason="no_room", message="all slots are taken")
    starts.set_start_duration(KEY, START)
    starts.set_problem(KEY, problem)
    assert starts.wait_estimate(KEY, 0.0) == WaitEstimate(9.0, problem=problem)
    assert starts.wait_estimate(KEY, 0.0).heartbeat_text() == " remaining_s=9.0 reason=no_room"
    assert starts.wait_estimate(OTHER, 0.0).problem is None
    ends: list[Callable[[], None]] = [
        partial(starts.set_problem, KEY, None),
        partial(starts.clear_version, KEY),
        starts.clear,
    ]
    for end in ends:
        starts.set_problem(KEY, problem)
        assert starts.keys() == {KEY}
        end()
        assert starts.problem(KEY) is None


def test_guest_is_told_the_reason_alone() -> None:
    """The message may contain secrets of the owner, so the guest gets the reason only."""
    problem = StartProblem(reason="missing_secret", message="the secret `s3` is missing", exit_status=3)
    assert redact_for_caller(problem, is_owner=True) is problem
    redacted = redact_for_caller(problem, is_owner=False)
    assert (redacted.reason, redacted.exit_status) == ("missing_secret", None)
    assert "s3" not in redacted.message
