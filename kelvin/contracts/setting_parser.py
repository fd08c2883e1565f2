"""Read typed settings once, and refuse a bad one with its value: `KELVIN_QUEUE_REQUESTS=-3: must be 1 or more`.

Pure: takes a mapping. Only the `settings.py` of a package passes the environment.
"""

import re
from collections.abc import Mapping
from typing import Final

MAX_SHOWN_CHARACTERS: Final = 400  # characters of a value in an error message
_CREDENTIALS: Final = re.compile(r"://\S*@")  # credentials in a URL; a secret may contain slashes


class BadSetting(ValueError):
    """A setting breaks its `rule`. `shown_value` is the value's beginning, without a URL's credentials."""

    def __init__(self, name: str, value: str, rule: str) -> None:
        self.shown_value, self.rule = _CREDENTIALS.sub("://…@", value)[:MAX_SHOWN_CHARACTERS], rule
        super().__init__(f"{name}={self.shown_value}: {rule}")


def text(env: Mapping[str, str], name: str, default: str | None = None) -> str:
    """Return a non-empty text. Without a default, the setting is required."""
    value = env.get(name, default)
    if value is None or value == "":
        raise BadSetting(name, value or "", "is required")
    return value


def integer(env: Mapping[str, str], name: str, default: int, *, low: int, high: int | None = None) -> int:
    """Return a whole number from `low` to `high`, both included."""
    raw = env.get(name)
    if raw is None:
        return default
    try:
        value = int(_ascii(raw))
    except ValueError:
        raise BadSetting(name, raw, "must be a whole number") from None
    _check_range(name, raw, value, low, high)
    return value


def number(env: Mapping[str, str], name: str, default: float, *, low: float, high: float | None = None) -> float:
    """Return a finite number from `low` to `high`, both included."""
    raw = env.get(name)
    if raw is None:
        return default
    try:
        value = float(_ascii(raw))
    except ValueError:
        raise BadSetting(name, raw, "must be a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise BadSetting(name, raw, "must be finite")
    _check_range(name, raw, value, low, high)
    return value


def choice(env: Mapping[str, str], name: str, default: str, options: tuple[str, ...]) -> str:
    """Return one of the `options`."""
    value = env.get(name, default)
    if value not in options:
        raise BadSetting(name, value, f"must be one of {', '.join(options)}")
    return value


def _ascii(raw: str) -> str:
    """Return `raw`. Raises ValueError for digits of other scripts, which `int` and `float` would accept."""
    if not raw.isascii():
        raise ValueError(raw)
    return raw


def _check_range(name: str, raw: str, value: float, low: float, high: float | None) -> None:
    if value < low:
        raise BadSetting(name, raw, f"must be {low} or more")
    if high is not None and value > high:
        raise BadSetting(name, raw, f"must be {high} or less")
