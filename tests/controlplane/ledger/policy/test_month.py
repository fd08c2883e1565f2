"""A billing month lasts from midnight to midnight, in UTC."""

from datetime import UTC, datetime

import pytest

from controlplane.ledger.policy.month import day_of, month_bounds_us
from kelvin.contracts.errors import InvalidRequest, Refused


def instant(*parts: int) -> int:
    return int(datetime(*parts, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("month", "begin", "end"),
    [
        pytest.param("2026-11", (2026, 11, 1), (2026, 12, 1), id="thirty days"),
        pytest.param("2026-12", (2026, 12, 1), (2027, 1, 1), id="the turn of the year"),
        pytest.param("2028-02", (2028, 2, 1), (2028, 3, 1), id="a leap year"),
        pytest.param("1970-01", (1970, 1, 1), (1970, 2, 1), id="the first month"),
    ],
)
def test_bounds(month: str, begin: tuple[int, ...], end: tuple[int, ...]) -> None:
    """A month ends where the next one begins."""
    assert month_bounds_us(month) == (instant(*begin), instant(*end))
    assert day_of(instant(*begin)) == f"{month}-01"
    assert day_of(instant(*end) - 1)[:7] == month


@pytest.mark.parametrize(
    "month", ["2026-13", "2026-00", "26-11", "2026-1", "2026-11-01", "", "x" * 99, "1969-12", "9999-01"]
)
def test_malformed_month_is_refused(month: str) -> None:
    """The error has the value and the rule."""
    with pytest.raises(Refused) as caught:
        month_bounds_us(month)
    assert caught.value.failure == InvalidRequest("month", repr(month[:20]), "must be YYYY-MM, from 1970 on")
