"""The quantile over a sliding window equals that of a sorted list of the same numbers."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.sliding_quantile import SlidingQuantile


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60), st.integers(1, 9), st.floats(0.01, 1.0))
def test_quantile_is_that_of_the_latest_numbers(values: list[float], window: int, share: float) -> None:
    """The quantile is by nearest rank over the last `window` numbers."""
    sliding = SlidingQuantile(window)
    for value in values:
        sliding.add(value)
        sliding.check_integrity()
    latest = sorted(values[-window:])
    assert len(sliding) == len(latest)
    assert sliding.quantile(share) == latest[ceil(len(latest) * share) - 1]
