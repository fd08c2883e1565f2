"""Go's arithmetic: defined for every input, and different from Python's at the edges."""

from math import inf, isnan, nan

import pytest

from controlplane.scaling.policy.go_numbers import (
    INT32_MIN,
    go_ceil,
    go_divide,
    go_floor,
    go_max,
    go_min,
    go_power,
    int32,
    round_to_micro,
    to_nanoseconds,
)


@pytest.mark.parametrize(
    ("dividend", "divisor", "want"),
    [
        (6.0, 4.0, 1.5),
        (1.0, 0.0, inf),
        (-1.0, 0.0, -inf),
        (1.0, -0.0, -inf),
        (inf, 0.0, inf),
        (1e308, 0.01, inf),
        (0.0, 0.0, nan),
        (nan, 0.0, nan),
    ],
)
def test_division_follows_ieee_754(dividend: float, divisor: float, want: float) -> None:
    """This includes division by zero."""
    assert same(go_divide(dividend, divisor), want)


@pytest.mark.parametrize(
    ("one", "other", "largest", "smallest"),
    [
        (1.0, 2.0, 2.0, 1.0),
        (nan, 1.0, nan, nan),
        (1.0, nan, nan, nan),
        (nan, inf, inf, nan),
        (-inf, nan, nan, -inf),
    ],
)
def test_larger_and_smaller(one: float, other: float, largest: float, smallest: float) -> None:
    """Infinity wins over NaN as the maximum, minus infinity as the minimum. Other pairs with NaN give NaN."""
    assert same(go_max(one, other), largest)
    assert same(go_min(one, other), smallest)


@pytest.mark.parametrize(
    ("value", "up", "down"), [(1.5, 2, 1), (-1.5, -1, -2), (3.0, 3, 3), (inf, inf, inf), (nan, nan, nan)]
)
def test_rounding(value: float, up: float, down: float) -> None:
    """Infinity and NaN stay as they are."""
    assert same(go_ceil(value), up)
    assert same(go_floor(value), down)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param(2.9, 2, id="towards zero"),
        pytest.param(-2.9, -2, id="negative, towards zero"),
        pytest.param(2147483647.5, 2147483647, id="the largest"),
        pytest.param(2147483648.0, INT32_MIN, id="above the largest"),
        pytest.param(-2147483648.5, INT32_MIN, id="below the smallest"),
        pytest.param(-inf, INT32_MIN, id="minus infinity"),
        pytest.param(nan, INT32_MIN, id="no number"),
    ],
)
def test_int32(value: float, want: int) -> None:
    """Out-of-range values give INT32_MIN, as on amd64."""
    assert int32(value) == want


def test_times_are_whole_nanoseconds() -> None:
    """Tenths of a second add up exactly."""
    assert to_nanoseconds(0.1) + to_nanoseconds(0.2) == to_nanoseconds(0.3)
    assert to_nanoseconds(-1.5) == -1_500_000_000


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, 60])
def test_power_is_close_to_pythons(exponent: int) -> None:
    """Go's algorithm multiplies by squares, so its last digits may differ."""
    assert go_power(0.8, exponent) == pytest.approx(0.8**exponent, rel=1e-14)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        pytest.param(1 / 3, 0.333333, id="rounded"),
        pytest.param(2**-7, 0.007813, id="a half up"),
        pytest.param(-(2**-7), -0.007813, id="a half down below zero"),
        pytest.param(1e300, 1e300, id="large"),
        pytest.param(1e305, inf, id="too large to be rounded"),
        pytest.param(nan, nan, id="no number"),
    ],
)
def test_rounding_to_micro_goes_away_from_zero(value: float, want: float) -> None:
    assert same(round_to_micro(value), want)


def same(one: float, other: float) -> bool:
    """Return whether both are equal or both are NaN."""
    return one == other or (isnan(one) and isnan(other))
