"""Costs are divided exactly."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.drivers.engine_base import apportion


@given(total=st.integers(0, 10**9), weights=st.lists(st.integers(0, 1000), min_size=1).filter(any))
def test_apportion(total: int, weights: list[int]) -> None:
    """The shares sum to the total, and each is within one of its exact value."""
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * sum(weights) - total * weight) < sum(weights)
        assert share == 0 or weight > 0 or share <= 1
