"""Compute calendar months in UTC as ranges of microseconds since 1970."""

import re
from datetime import UTC, date, datetime
from typing import Final

from kelvin.contracts.errors import InvalidRequest, Refused

_MONTH: Final = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")
DAY_US: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def month_bounds_us(month: str) -> tuple[int, int]:
    """Return the first microsecond of the month and of the next one. Raises Refused(InvalidRequest) unless YYYY-MM."""
    if not is_month(month):
        raise Refused(InvalidRequest("month", repr(month[:20]), "must be YYYY-MM, from 1970 on"))
    year, number = int(month[:4]), int(month[5:])
    following = date(year + number // 12, number % 12 + 1, 1)
    return day_us(date(year, number, 1)), day_us(following)


def is_month(text: str) -> bool:
    """Return whether the text is YYYY-MM, from 1970 on."""
    match = _MONTH.fullmatch(text)
    return match is not None and 1970 <= int(match[1]) <= 9998


def month_of(at_us: int) -> str:
    """Return the month (UTC) of a time, YYYY-MM."""
    return day_of(at_us)[:7]


def month_after(month: str) -> str:
    """Return the following month."""
    year, number = int(month[:4]), int(month[5:])
    return f"{year + number // 12:04}-{number % 12 + 1:02}"


def day_us(day: date) -> int:
    """Return the microsecond at which `day` begins (midnight UTC)."""
    return (datetime(day.year, day.month, day.day, tzinfo=UTC) - _EPOCH).days * DAY_US


def day_of(at_us: int) -> str:
    """Return the date (UTC) of a time, YYYY-MM-DD."""
    return date.fromordinal(_EPOCH.toordinal() + at_us // DAY_US).isoformat()
