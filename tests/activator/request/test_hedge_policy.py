"""When a first frame is late: by the latencies of recent requests, and only once enough are known."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.request.hedge_policy import FirstFrameLatencies, HedgeLimits, hedge_after_s

LIMITS = HedgeLimits()


@pytest.mark.parametrize(
    ("took_s", "want"),
    [
        pytest.param([], None, id="no latency is known"),
        pytest.param([0.1] * 99, None, id="99 latencies are not enough"),
        pytest.param([0.1] * 100, 0.1, id="100 latencies are enough"),
        pytest.param([n / 100 for n in range(1, 101)], 0.95, id="five of a hundred are later"),
        pytest.param([n / 100 for n in range(100, 0, -1)], 0.95, id="in any order"),
        pytest.param([9.0] * 1000 + [0.1] * 256, 0.1, id="old latencies are forgotten"),
        pytest.param([9.0] * 14 + [0.1] * 242, 9.0, id="latencies in the window count"),
        pytest.param([0.001] * 100, 0.01, id="the threshold has a minimum"),
    ],
)
def test_first_frame_is_late_past_the_percentile(took_s: list[float], want: float | None) -> None:
    """The version is "a". Another version has no threshold."""
    frames = FirstFrameLatencies[str]()
    for seconds in took_s:
        frames.record_first_frame("a", seconds)
    frames.check_integrity()
    assert frames.late_after_s("a") == want
    assert frames.late_after_s("another") is None


@pytest.mark.parametrize(
    ("late_after_s", "remaining_s", "is_cold", "want"),
    [
        pytest.param(0.5, 9.0, False, 0.5, id="a warm request with time left"),
        pytest.param(None, 9.0, False, None, id="no latency is known"),
        pytest.param(0.5, 9.0, True, None, id="it waited for a start"),
        pytest.param(0.5, 0.5, False, None, id="its deadline comes first"),
    ],
)
def test_hedge_needs_time_and_a_warm_request(
    late_after_s: float | None, remaining_s: float, is_cold: bool, want: float | None
) -> None:
    assert hedge_after_s(late_after_s, remaining_s, is_cold=is_cold) == want


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6, allow_nan=False)), max_size=80))
def test_late_threshold_is_the_percentile_of_the_window(history: list[tuple[str, float]]) -> None:
    """The threshold is the percentile of the latest latencies of its version. The number of versions is bounded."""
    limits = HedgeLimits(min_samples=3, window=7, percentile=0.8, shortest_late_s=0.0, max_windows=2)
    frames = FirstFrameLatencies[str](limits)
    latest: dict[str, list[float]] = {}
    for version, seconds in history:
        frames.record_first_frame(version, seconds)
        latest[version] = [*latest.pop(version, []), seconds][-limits.window :]
        if len(latest) > limits.max_windows:
            del latest[next(iter(latest))]
        frames.check_integrity()
    for version in "abc":
        known = sorted(latest.get(version, []))
        late = frames.late_after_s(version)
        if len(known) < limits.min_samples:
            assert late is None
        else:
            assert late in known
            assert sum(each > late for each in known) <= len(known) - ceil(len(known) * limits.percentile)
