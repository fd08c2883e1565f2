"""Durations as people write them."""

import pytest

from kelvin.policy.rate import parse_duration_s


@pytest.mark.parametrize(("text", "want"), [("45s", 45), ("30m", 1800), ("24h", 86_400), ("90d", 7_776_000), ("0s", 0)])
def test_a_duration(text: str, want: int) -> None:
    """A whole number and a unit."""
    assert parse_duration_s(text) == want


@pytest.mark.parametrize("text", ["", "24", "h", "1.5h", "-1h", "1w", "24 h", "9999999999s"])
def test_what_is_none(text: str) -> None:
    """The value and the rule are named."""
    with pytest.raises(ValueError, match="must be a whole number and one of s, m, h, d"):
        parse_duration_s(text)
