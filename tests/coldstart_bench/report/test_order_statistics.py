"""Medians come with a confidence interval."""

import random

import pytest

from coldstart_bench.report.order_statistics import median_of


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        pytest.param([3.0], 3.0, 3.0, 3.0, id="one value says only itself"),
        pytest.param([1.0, 2.0, 9.0, 4.0], 3.0, 1.0, 9.0, id="four values give their range"),
        pytest.param([float(n) for n in range(15)], 7.0, 3.0, 11.0, id="fifteen values give ranks four and twelve"),
    ],
)
def test_median_of(values: list[float], median: float, low: float, high: float) -> None:
    """The interval's ranks follow the sign test."""
    found = median_of(values)
    assert (found.median, found.low, found.high) == (median, low, high)


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """At least 94 % of 2,000 intervals from samples of 15 contain the true median (ln 2) of a skewed distribution."""
    rng = random.Random(1)
    held = sum(_holds([rng.expovariate(1.0) for _ in range(15)], 0.6931) for _ in range(2000))
    assert held / 2000 >= 0.94


def _holds(sample: list[float], truth: float) -> bool:
    found = median_of(sample)
    return found.low <= truth <= found.high


def test_median_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_of([])
