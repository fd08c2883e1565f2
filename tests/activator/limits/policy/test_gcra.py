"""The token bucket of a limit per minute: usage in any interval is at most the refill plus one minute's worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.limits.policy.gcra import MINUTE_S, Bucket, Buckets, RateStatus, duration

LIMIT = 60  # one unit per second


@pytest.mark.parametrize(
    ("gaps_s", "want"),
    [
        pytest.param([0.0] * 60, None, id="a minute's worth at once"),
        pytest.param([0.0] * 61, 1.0, id="the next one waits for one unit"),
        pytest.param([0.0] * 99, 1.0, id="a refusal does not lengthen the wait"),
        pytest.param([0.0] * 60 + [1.0], None, id="it passes after the wait"),
        pytest.param([0.0] * 60 + [0.75], 0.25, id="it does not pass before"),
        pytest.param([1.0] * 500, None, id="requests at the rate always pass"),
        pytest.param([*[0.0] * 60, 9999.0, *[0.0] * 60], 1.0, id="a long pause is worth one minute"),
    ],
)
def test_request_rate_of_a_tenant_is_limited(gaps_s: list[float], want: float | None) -> None:
    """Return the wait of the last request, when requests arrive with these gaps."""
    bucket, now_s, found = Bucket(), 1000.0, None
    for gap_s in gaps_s:
        now_s += gap_s
        found = bucket.hold(LIMIT, 1, now_s)
        if found.wait_s is None:
            bucket.settle(LIMIT, 1, 1, now_s)
    assert found is not None
    assert found.wait_s == (None if want is None else pytest.approx(want))


def test_estimate_is_held_and_actual_use_is_charged() -> None:
    """Units held by running requests are not available. Unused ones return at once."""
    bucket = Bucket()
    assert bucket.hold(100, 80, 0.0) == RateStatus(100, 20, 0.0)
    assert bucket.hold(100, 30, 0.0) == RateStatus(100, 20, 0.0, wait_s=6.0)
    bucket.settle(100, 80, 10, 30.0)
    assert bucket.rate_status(100, 30.0) == RateStatus(100, 90, 6.0)
    bucket.hold(100, 90, 30.0)
    bucket.settle(100, 90, 0, 30.0)
    assert bucket.rate_status(100, 30.0).remaining == 90


def test_underestimate_is_charged_in_full() -> None:
    """The next request waits until the debt is repaid."""
    bucket = Bucket()
    bucket.hold(60, 10, 0.0)
    bucket.settle(60, 10, 90, 0.0)
    assert bucket.rate_status(60, 0.0) == RateStatus(60, 0, 90.0)
    assert bucket.hold(60, 1, 0.0).wait_s == pytest.approx(31.0)
    assert bucket.hold(60, 1, 31.0).wait_s is None


def test_a_limit_that_changes_keeps_the_share_that_is_used() -> None:
    """If half the old limit is used, half the new one is left."""
    bucket = Bucket()
    bucket.hold(60, 30, 0.0)
    bucket.settle(60, 30, 30, 0.0)
    assert [bucket.rate_status(limit, 0.0).remaining for limit in (60, 600, 6)] == [30, 300, 3]


STEPS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(0, 60), st.floats(0, 100)), min_size=1, max_size=60
)


@given(STEPS, st.integers(1, 100))
def test_no_window_has_more_than_flows_in_and_a_minutes_worth(
    steps: list[tuple[float, int, int, float]], limit: int
) -> None:
    """Requests have any estimate and duration and use up to the estimate. Both what is charged and what enters in any
    interval are within the limit.
    """
    bucket, now_s = Bucket(), 0.0
    ending: list[tuple[float, float, int, int]] = []
    entered: list[tuple[float, int]] = []
    charged: list[tuple[float, int]] = []

    def end(until_s: float) -> None:
        for each in sorted(ending):
            if each[0] <= until_s:
                ending.remove(each)
                at_s, began_s, held, used = each
                bucket.settle(limit, held, used, at_s)
                charged.append((at_s, used))
                entered.append((began_s, used))

    for gap_s, estimate, truth, lasts_s in steps:
        now_s += gap_s
        end(now_s)
        before = bucket.free_units(limit, now_s)
        found = bucket.hold(limit, estimate, now_s)
        if found.wait_s is None:
            ending.append((now_s + lasts_s, now_s, estimate, min(truth, estimate)))
        else:
            assert 0 < found.wait_s <= MINUTE_S
            assert estimate > before
        assert 0 <= found.remaining <= limit
    end(float("inf"))
    assert bucket.held == 0
    for series in (charged, entered):
        moments = sorted(at_s for at_s, _ in series)
        for first in moments[::3]:
            for last in moments[::4]:
                used = sum(units for at_s, units in series if first <= at_s <= last)
                assert used <= limit * ((max(0.0, last - first)) / MINUTE_S + 1) + 1e-3


def test_idle_buckets_are_forgotten() -> None:
    """Each tenant has its own bucket. Full buckets are forgotten; buckets with held units are kept."""
    buckets = Buckets(min_sweep_size=4)
    assert buckets.ensure_bucket("busy", 0.0).hold(2, 2, 0.0).wait_s is None
    for number in range(100):
        bucket = buckets.ensure_bucket(f"other {number}", float(number))
        assert bucket.hold(60, 1, float(number)).wait_s is None
        bucket.settle(60, 1, 1, float(number))
        buckets.check_integrity()
    assert buckets.ensure_bucket("busy", 100.0).hold(2, 1, 100.0).wait_s is not None
    assert repr(buckets).endswith("held=2>")


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0.0, "0ms"),
        (0.0174, "17ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (83.25, "1m23.25s"),
    ],
)
def test_durations_in_gos_form(seconds: float, want: str) -> None:
    """The format is the one that OpenAI clients parse."""
    assert duration(seconds) == want
