"""Windows average as Knative's: a young window divides by its own age, silence is not zero at once, buckets add up.

The numbers are from knative/serving's tests (pkg/autoscaler/aggregation/bucketing_test.go).
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.windows import (
    LinearWindow,
    WeightedWindow,
    convert_window,
    panic_window_s,
    smoothing_coefficient,
)

T0 = 1_000_000.0


def filled(window: LinearWindow, *values: float, start: float = T0, every: float = 1.0) -> LinearWindow:
    """Record one value per second and return the window."""
    for number, value in enumerate(values):
        window.record(start + number * every, value)
    return window


@pytest.mark.parametrize(
    ("values", "after_s", "want"),
    [
        pytest.param((), 0, 0.0, id="an empty window is zero"),
        pytest.param((1,), 0, 1.0, id="one second of data is divided by one second"),
        pytest.param((1, 2, 3, 4, 5), 4, 3.0, id="a full window is divided by its length"),
        pytest.param((1, 2, 3, 4, 5), 3.6, 3.0, id="a reader that lags behind the last write sees the last write"),
        pytest.param((1, 2, 3, 4, 5), 6, (15 - 1 - 2) / 3, id="two silent seconds leave both sum and divisor"),
        pytest.param((1, 2, 3, 4, 5), 8, 5.0, id="four silent seconds leave the last bucket"),
        pytest.param((1, 2, 3, 4, 5), 9, 0.0, id="a whole silent window is zero"),
        pytest.param((1, 2, 3, 4, 5), 10, 0.0, id="more than a silent window is zero"),
        pytest.param((1, 2, 3, 4, 5, 6), 5, 4.0, id="the sixth second replaces the first"),
        pytest.param((1, 2, 3, 4, 5), 6.9, (15 - 1 - 2) / 3, id="a second counts only once it has ended"),
        pytest.param((1, 2, 3, 4, 5), 8.9, 5.0, id="the same at the end of the window"),
        pytest.param((1, 1, 2), 2, 1.333333, id="rounded to six digits"),
        pytest.param((2**-7,), 0, 0.007813, id="halves are rounded away from zero"),
    ],
)
def test_linear_average(values: tuple[float, ...], after_s: float, want: float) -> None:
    """A window of five seconds is written from T0 on and read `after_s` later."""
    assert filled(LinearWindow(5), *values).average(T0 + after_s) == want


def test_average_follows_a_long_series_of_writes() -> None:
    """The series has gaps, jumps, late values and values older than the window."""
    window = filled(LinearWindow(5), 1, 2, 3, 4, 5)
    window.record(T0 + 6, 91)
    assert window.average(T0 + 6) == (15 - 1 - 2 + 91) / 5, "a skipped second counts as zero once there is a write"
    later = T0 + 60
    window.record(later, 1984)
    assert window.average(later) == 1984, "after a silent window the average restarts"
    window.record(later - 3, 4)
    assert window.average(later) == (4 + 1984) / 4, "a late value within the window moves its beginning back"
    window.record(later + 1, 5)
    assert window.average(later + 1) == round((4 + 1984 + 5) / 5, 6)
    window.record(later - 2, 10)
    assert window.average(later + 1) == round((4 + 10 + 1984 + 5) / 5, 6)
    for too_early in (later - 5, later - 4):
        window.record(too_early, 10)
        assert window.average(later + 1) == round((4 + 10 + 1984 + 5) / 5, 6), "older than the window: dropped"
    window.record(later + 6, 10)
    assert window.average(later + 6) == 10, "exactly one window of silence resets"
    window.check_integrity()


def test_values_of_one_second_add_up() -> None:
    """Reports of several activators add up. An activator that reports twice in a second counts twice."""
    window = LinearWindow(60)
    for share in (1.0, 10.0, 0.5):
        window.record(T0 + share / 100, share)
    assert window.average(T0) == 11.5


def test_writing_backwards_averages_the_same() -> None:
    """Nine seconds are written from the last to the first. Values older than the window do not count."""
    window = LinearWindow(5)
    for second in range(8, -1, -1):
        window.record(T0 + second, 5)
    assert window.average(T0 + 5) == 5


def test_coarse_buckets() -> None:
    """Buckets of three seconds, and a window that is no multiple of three."""
    start = 999_999.0
    window = LinearWindow(5, bucket_s=3)
    for second, value in enumerate((10, 2, 3, 4, 5, 6, 7)):
        window.record(start + second, value)
    assert window.average(start + 6) == (4 + 5 + 6 + 7) / 2
    window.resize(10, start + 6)
    assert window.average(start + 6) == (4 + 5 + 6 + 7) / 2
    window.record(start + 9.3, 42)
    assert window.average(start + 9) == round((4 + 5 + 6 + 7 + 42) / 3, 6)


def test_silence_in_coarse_buckets() -> None:
    """Silence is measured in seconds, not in buckets."""
    start = 999_999.0
    linear, weighted = LinearWindow(9, bucket_s=3), WeightedWindow(9, bucket_s=3)
    for window in (linear, weighted):
        window.record(start, 6)
        window.record(start + 3, 3)
    assert linear.average(start + 3.9) == 4.5
    assert linear.average(start + 6) == 4.5
    assert linear.average(start + 9) == 3
    assert linear.average(start + 11.9) == 3
    assert linear.average(start + 12) == 0
    c = smoothing_coefficient(3)
    assert weighted.average(start + 8.9) == pytest.approx((3 * c + 6 * c * (1 - c)) * (1 - c))
    assert not linear.is_empty(start + 12)
    assert linear.is_empty(start + 15)
    linear.record(start + 12, 7)
    assert linear.average(start + 12) == 7, "a whole silent window resets"


@pytest.mark.parametrize(
    ("after_s", "want"),
    [
        pytest.param(4, False, id="just written"),
        pytest.param(9.9, False, id="within the last second of the window"),
        pytest.param(9, False, id="exactly a window ago is not empty yet"),
        pytest.param(10, True, id="longer than a window ago"),
    ],
)
def test_is_empty(after_s: float, want: bool) -> None:
    """A window becomes empty one second after its average is zero. An empty window makes a decision invalid."""
    assert LinearWindow(5).is_empty(T0)
    assert filled(LinearWindow(5), 1, 2, 3, 4, 5).is_empty(T0 + after_s) is want


def test_resizing_keeps_the_newest_values() -> None:
    """A longer window keeps every value and counts as a full old one. A shorter window drops the oldest values."""
    window = filled(LinearWindow(5), 1, 2, 3, 4, 5, 6)
    now = T0 + 5
    window.resize(10, now)
    assert window.average(now) == 20 / 5
    window.record(now + 1, 7)
    assert window.average(now + 1) == 27 / 6
    window.resize(4, now + 1)
    assert window.average(now + 1) == 22 / 4
    window.resize(4, now + 1)
    assert window.average(now + 1) == 22 / 4
    window.check_integrity()
    window.resize(8, now + 100)
    assert window.average(now + 100) == 0, "an empty window forgets"
    window.record(now + 101, 3)
    assert window.average(now + 101) == 3
    window.check_integrity()


def test_weighted_average() -> None:
    """Each older second weighs (1-c) times the next one. Silence decays, and a young window is not scaled up."""
    window = WeightedWindow(5)
    c = smoothing_coefficient(5)
    window.record(T0, 2)
    assert window.average(T0) == 2 * c
    assert window.average(T0 + 1) == pytest.approx(2 * c * (1 - c))
    window.record(T0 + 1, 2)
    assert window.average(T0 + 1) == pytest.approx(2 * c * (1 - c) + 2 * c)
    filled(window, 2, 3, 4, 5, 6, start=T0 + 2)
    want = sum(value * c * (1 - c) ** age for age, value in enumerate((6, 5, 4, 3, 2)))
    assert window.average(T0 + 6) == pytest.approx(want)
    assert window.average(T0 + 16) == 0
    assert window.average(T0 + 11) == 0, "a whole window later no bucket is left to weigh"


def test_converted_window_keeps_its_values() -> None:
    """This holds in both directions. A window that already has the kind is returned as it is."""
    window = filled(LinearWindow(5), 1, 2, 3, 4, 5, 6)
    now, linear = T0 + 5, window.average(T0 + 5)
    assert convert_window("linear", window) is window
    weighted = convert_window("weighted", window)
    assert type(weighted) is WeightedWindow
    assert round(weighted.average(now), 3) == 5.812
    weighted.record(now + 1, 7)
    weighted.check_integrity()
    back = convert_window("linear", weighted)
    assert (linear, back.average(now + 1)) == (4, 5)
    back.resize(2, now + 1)
    assert back.average(now + 1) == 6.5


def test_weighted_average_computed_by_hand() -> None:
    """[2, 3, 4, 5, 6] in a window of five seconds is 5.812."""
    assert round(filled(WeightedWindow(5), 1, 2, 3, 4, 5, 6).average(T0 + 5), 3) == 5.812


@pytest.mark.parametrize(
    ("buckets", "want"),
    [
        pytest.param(100, 0.2, id="a long window has the slowest decay"),
        pytest.param(60, 0.2, id="a minute has the slowest decay, too"),
        pytest.param(42, 0.2, id="the slowest decay starts at 42 buckets"),
        pytest.param(40, 0.20567, id="40 buckets"),
        pytest.param(6, 0.78456, id="a panic window of six seconds"),
    ],
)
def test_smoothing(buckets: int, want: float) -> None:
    """The coefficient depends on the number of buckets."""
    assert smoothing_coefficient(buckets) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("stable_s", "percentage", "want"),
    [
        pytest.param(60, 10, 6, id="the defaults"),
        pytest.param(6, 10, 1, id="the shortest window has a panic window of one second"),
        pytest.param(25, 10, 3, id="a half second is rounded up"),
        pytest.param(24, 10, 2, id="less than half is rounded down"),
        pytest.param(60, 100, 60, id="as long as the stable one"),
    ],
)
def test_panic_window(stable_s: float, percentage: float, want: int) -> None:
    """The panic window is in whole seconds, at least one."""
    assert panic_window_s(stable_s, percentage) == want


@pytest.mark.parametrize(("window_s", "bucket_s"), [(0, 1), (-1, 1), (5, 0)])
def test_impossible_windows_are_refused(window_s: float, bucket_s: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        LinearWindow(window_s, bucket_s)


class Naive:
    """The definition without a ring: it keeps all writes and averages them."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.writes: list[tuple[int, float]] = []
        self.first: int | None = None
        self.last: int | None = None

    def record(self, second: int, value: float) -> None:
        if self.last is not None and second <= self.last - self.window:
            return
        if self.last is None or self.first is None or second >= self.last + self.window:
            self.writes, self.first, self.last = [], second, second
        self.first, self.last = min(self.first, second), max(self.last, second)
        self.writes.append((second, value))

    def average(self, now: int) -> float:
        if self.last is None or self.first is None or now >= self.last + self.window:
            return 0.0
        now = max(now, self.last)
        oldest = now - self.window + 1
        total = sum(value for second, value in self.writes if oldest <= second <= self.last)
        return total / min(self.last - self.first + 1, self.last - oldest + 1)


@given(
    window=st.integers(min_value=1, max_value=8),
    steps=st.lists(
        st.tuples(st.integers(min_value=-9, max_value=9), st.integers(min_value=0, max_value=50)), max_size=40
    ),
)
def test_ring_buffer_agrees_with_the_definition(window: int, steps: list[tuple[int, int]]) -> None:
    """This holds for any writes, forwards and backwards in time."""
    ring, naive, now = LinearWindow(window), Naive(window), int(T0)
    for move, value in steps:
        now += move
        ring.record(float(now), value)
        naive.record(now, value)
        ring.check_integrity()
        for ahead in range(window + 2):
            assert ring.average(now + ahead) == pytest.approx(naive.average(now + ahead), abs=1e-6)


@given(st.lists(st.floats(min_value=0, max_value=1000), min_size=1, max_size=30))
def test_an_average_lies_between_the_least_and_the_largest(values: list[float]) -> None:
    """The weighted average is at most the largest value in the window; it may be lower than the least."""
    linear, weighted = filled(LinearWindow(6), *values), filled(WeightedWindow(6), *values)
    now, recent = T0 + len(values) - 1, values[-6:]
    assert min(recent) - 1e-6 <= linear.average(now) <= max(recent) + 1e-6
    assert 0 <= weighted.average(now) <= max(recent) + 1e-9
    assert math.isfinite(weighted.average(now + 3))
