"""The less loaded of two."""

import pytest

from activator.policy.balance import Occupancy, less_loaded


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        pytest.param(Occupancy(1, 8), Occupancy(0, 8), True, id="the emptier one"),
        pytest.param(Occupancy(0, 8), Occupancy(1, 8), False, id="the first if it is emptier"),
        pytest.param(Occupancy(3, 8), Occupancy(3, 8), False, id="a tie stays with the first"),
        pytest.param(Occupancy(2, 4), Occupancy(3, 16), True, id="by share, not by count"),
    ],
)
def test_less_loaded(first: Occupancy, second: Occupancy, want: bool) -> None:
    """Whether the second is the better choice."""
    assert less_loaded(first, second) is want
