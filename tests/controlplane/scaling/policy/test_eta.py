"""Restore estimates: the larger of process start and load, plus the later steps, learned from past starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.eta import (
    GUESS,
    MAX_FORECAST_ERRORS,
    MAX_VERSIONS,
    PARKED_S,
    EstimateBasis,
    PastForecast,
    RestoreEstimate,
    RestoreHistory,
    StageTimes,
    size_class,
)
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import encode

MB = 1 << 20


def spans(promoted_s: float, leased_s: float, ready_s: float) -> tuple[StageSpan, ...]:
    """Return the spans of a start, each counted from its request."""
    ends = {Stage.DECIDED: 0.0, Stage.PROMOTED: promoted_s, Stage.LEASED: leased_s, Stage.READY: ready_s}
    return tuple(StageSpan(stage, round(after_s * 1e6)) for stage, after_s in ends.items())


@pytest.mark.parametrize(
    ("process_s", "bytes_s", "ready_s"),
    [
        pytest.param(0.3, 0.1, 0.45, id="a slow process start hides the load"),
        pytest.param(0.1, 0.3, 0.45, id="a slow load hides the process start"),
        pytest.param(0.0, 0.0, 0.15, id="a process and bytes that are there leave the steps"),
    ],
)
def test_process_start_and_load_overlap(process_s: float, bytes_s: float, ready_s: float) -> None:
    """The later steps follow one after the other."""
    found = RestoreEstimate(process_s, bytes_s, StageTimes(lease_s=0.05, bind_s=0.1, answer_s=0.2), EstimateBasis.GUESS)
    assert found.ready_s == pytest.approx(ready_s)
    assert found.first_token_s == pytest.approx(ready_s + 0.2)


def test_estimate_uses_own_starts_then_size_then_default() -> None:
    history = RestoreHistory[str]()
    assert history.estimate("a", 100 * MB, 0.0, parked=True) == RestoreEstimate(
        PARKED_S, 0.0, GUESS, EstimateBasis.GUESS
    )
    history.record_start("a", 100 * MB, spans(0.01, 0.03, 0.23), parked=True, bytes_s=0.0, tier="host")
    own = history.estimate("a", 100 * MB, 0.5, parked=True)
    assert own.basis is EstimateBasis.VERSION
    assert (own.process_s, own.steps.lease_s, own.steps.bind_s) == pytest.approx((0.01, 0.02, 0.2))
    same_size = history.estimate("b", 101 * MB, 0.5, parked=True)
    assert same_size.basis is EstimateBasis.SIZE
    assert same_size.ready_s == pytest.approx(own.ready_s)
    assert history.estimate("c", 900 * MB, 0.5, parked=True).basis is EstimateBasis.GUESS


def test_forked_and_parked_starts_are_averaged_apart() -> None:
    history = RestoreHistory[str]()
    history.record_start("a", MB, spans(0.5, 0.6, 0.7), parked=False, bytes_s=None, tier="host")
    assert history.estimate("a", MB, 0.0, parked=True).process_s == PARKED_S
    assert history.estimate("a", MB, 0.0, parked=False).process_s == pytest.approx(0.5)


def test_start_and_wake_times_are_means_of_samples() -> None:
    """They have the sample count. Without samples they are defaults."""
    history = RestoreHistory[str]()
    assert history.start_time("a", MB).samples == 0
    history.record_start("a", MB, spans(0.1, 0.2, 1.0), parked=True, bytes_s=None, tier="host")
    history.record_start("a", MB, spans(0.1, 0.2, 2.0), parked=True, bytes_s=None, tier="host")
    assert history.start_time("a", MB).seconds == pytest.approx(1.3)
    assert history.start_time("a", MB).samples == 2
    history.record_wake("a", MB, 0.02)
    assert (history.wake_time("a", MB).seconds, history.wake_time("b", MB).seconds) == (0.02, 0.02)
    assert history.wake_time("c", 64 * MB).samples == 0


def test_deep_wake_and_start_share_lease_times() -> None:
    """Both use one mean of lease times, so a start from disk looks no worse than a wake from memory. Lease times by
    tier are separate.
    """
    history = RestoreHistory[str]()
    guess = history.refill_time("a", MB)
    assert guess.samples == 0
    assert guess.seconds == pytest.approx(GUESS.lease_s + GUESS.bind_s)
    history.record_start("a", MB, spans(0.1, 5.1, 5.3), parked=True, bytes_s=None, tier="nvme")
    unseen = history.refill_time("a", MB)
    assert unseen.samples == 0
    assert unseen.seconds == pytest.approx(5.2), "as for a start without its process"
    history.record_deep_wake("a", MB, spans(0.0, 1.0, 1.1), "host")
    fetch_s = 0.3 * 1.0 + 0.7 * 5.0
    assert history.start_time("a", MB).seconds == pytest.approx(0.3 + fetch_s)
    assert history.refill_time("a", MB).seconds == pytest.approx(0.1 + fetch_s)
    by_tier = history.fetch_times("a")
    assert {tier: each.seconds for tier, each in by_tier.items()} == pytest.approx({"nvme": 5.0, "host": 1.0})
    assert [each.samples for each in by_tier.values()] == [1, 1]
    history.record_deep_wake("a", MB, (StageSpan(Stage.READY, 5),), "host")
    assert history.refill_time("a", MB).samples == 1


def test_unmeasured_wake_is_at_most_a_deep_wake() -> None:
    """A wake does less than a deep wake. A measured wake is used as it is."""
    history = RestoreHistory[str]()
    history.record_start("a", MB, spans(0.001, 0.002, 0.022), parked=True, bytes_s=None, tier="host")
    assert history.wake_time("a", MB).seconds == history.refill_time("a", MB).seconds < 0.05
    history.record_wake("a", MB, 0.2)
    assert history.wake_time("a", MB).seconds == 0.2


def test_incomplete_spans_are_ignored() -> None:
    """Answers and forecast errors of a version that never started here are ignored, too."""
    history = RestoreHistory[str]()
    history.record_start("a", MB, (StageSpan(Stage.READY, 5),), parked=True, bytes_s=0.0, tier="host")
    history.record_answers("a", 3.0)
    history.record_forecast_error("a", PastForecast(predicted_s=1.0, actual_s=1.0, tier="nvme"))
    assert history.estimate("a", MB, 0.0, parked=True).basis is EstimateBasis.GUESS
    assert history.forecast_errors("a") == ()


def test_history_is_bounded() -> None:
    """The oldest versions and the oldest forecast errors are forgotten."""
    history = RestoreHistory[int]()
    for number in range(MAX_VERSIONS + 5):
        history.record_start(number, MB, spans(0.1, 0.2, 0.3), parked=True, bytes_s=None, tier="host")
    for number in range(MAX_FORECAST_ERRORS + 5):
        history.record_forecast_error(MAX_VERSIONS, PastForecast(predicted_s=1.0, actual_s=float(number), tier="host"))
    assert history.estimate(0, 64 * MB, 0.0, parked=True).basis is EstimateBasis.GUESS
    assert [miss.actual_s for miss in history.forecast_errors(MAX_VERSIONS)] == [
        float(n) for n in range(5, MAX_FORECAST_ERRORS + 5)
    ]


def test_slow_tier_does_not_change_lease_time() -> None:
    """Otherwise a start from memory would be expected to take as long as a slow disk."""
    history = RestoreHistory[str]()
    history.record_start("a", MB, spans(0.01, 5.0, 5.1), parked=True, bytes_s=1.0, tier="host")
    assert history.estimate("a", MB, 0.0, parked=True).steps.lease_s == GUESS.lease_s


def test_overlapped_and_plain_bind_times_are_averaged_apart() -> None:
    """A start that moved bytes and one from memory do not share bind times once both are known."""
    history = RestoreHistory[str]()
    history.record_start("a", MB, spans(0.01, 0.02, 0.12), parked=True, bytes_s=0.0, tier="host")
    assert history.estimate("a", MB, 0.5, parked=True).steps.bind_s == pytest.approx(0.1)
    history.record_start("a", MB, spans(0.01, 0.60, 0.61), parked=True, bytes_s=0.5, tier="host")
    assert history.estimate("a", MB, 0.5, parked=True).steps.bind_s == pytest.approx(0.01)
    assert history.estimate("a", MB, 0.0, parked=True).steps.bind_s == pytest.approx(0.1)


@given(
    steps=st.tuples(st.floats(0.001, 1), st.floats(0.0, 1), st.floats(0.001, 1)),
    noise=st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8),
)
def test_forecast_of_steady_version_is_within_a_fifth(steps: tuple[float, float, float], noise: list[float]) -> None:
    """Eight starts vary by a tenth. The ninth is forecast within a fifth."""
    process_s, lease_s, bind_s = steps
    history = RestoreHistory[str]()
    for factor in noise:
        promoted_s = process_s * factor
        leased_s = promoted_s + lease_s * factor
        found = spans(promoted_s, leased_s, leased_s + bind_s * factor)
        history.record_start("a", MB, found, parked=True, bytes_s=0.0, tier="host")
    estimate = history.estimate("a", MB, 0.0, parked=True)
    assert estimate.steps.lease_s == pytest.approx(lease_s, rel=0.2, abs=2e-6)
    assert estimate.steps.bind_s == pytest.approx(bind_s, rel=0.2, abs=2e-6)


def test_wrong_forecast_has_wrong_ratio() -> None:
    """Negative control of the measure: a forecast of half the time has ratio 2, and one of zero does not divide by
    zero.
    """
    assert PastForecast(predicted_s=1.0, actual_s=2.0, tier="nvme").ratio == 2.0
    assert PastForecast(predicted_s=0.0, actual_s=1.0, tier="nvme").ratio > 1000
    encoded = encode(PastForecast(predicted_s=1.0, actual_s=2.5, tier="nvme"))
    assert encoded == b'{"predicted_s":1.0,"actual_s":2.5,"tier":"nvme"}'
    assert size_class(0) == 0
