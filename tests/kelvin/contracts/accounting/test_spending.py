"""The cost of a request."""

import pytest

from kelvin.contracts.accounting.spending import TokenPrices

PRICES = TokenPrices(per_tokens=1000, prompt=500, cached=50, completion=1500, request=3)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param((0, 0, 0), 3, id="the price of a request"),
        pytest.param((1000, 0, 0), 503, id="a prompt"),
        pytest.param((1000, 1000, 0), 53, id="a cached prompt"),
        pytest.param((0, 0, 1000), 1503, id="a completion"),
        pytest.param((1, 0, 0), 4, id="rounded up"),
        pytest.param((1000, 400, 2000), 3 + 300 + 20 + 3000, id="all prices together"),
    ],
)
def test_request_cost_counts_each_kind_of_token(tokens: tuple[int, int, int], want: int) -> None:
    """The cost is in micro-units: prompt, cached and completion tokens at their prices, plus the price of a request."""
    assert PRICES.cost_micros(*tokens) == want
