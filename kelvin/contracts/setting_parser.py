"""Settings are read once, typed, and refused with the value: `KELVIN_QUEUE_REQUESTS=-3: must be 1 or more`.

Pure: takes a mapping. Only a package's `setting_parser.py` hands it the environment.
"""

import re
from collections.abc import Mapping
from typing import Final

MAX_SHOWN_CHARACTERS: Final = 400  # characters of a value
_CREDENTIALS: Final = re.compile(r"://\S*@")  # of a URL; a secret may hold slashes


class BadSetting(ValueError):
    """A setting breaks its rule; the text names variable, value (its beginning, where it is long) and rule. User and
    password of a URL are left out.
    """

    def __init__(self, name: str, value: str, rule: str) -> None:
        super().__init__(f"{name}={_CREDENTIALS.sub('://…@', value)[:MAX_SHOWN_CHARACTERS]}: {rule}")


def text(env: Mapping[str, str], name: str, default: str | None = None) -> str:
    """A non-empty text; without a default it is required."""
    value = env.get(name, default)
    if value is None or value == "":
        raise BadSetting(name, value or "", "is required")
    return value


def integer(env: Mapping[str, str], name: str, default: int, *, low: int, high: int | None = None) -> int:
    """A whole number from `low` to `high`, both included."""
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
    """A finite number from `low` to `high`, both included."""
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
    """One of these words."""
    value = env.get(name, default)
    if value not in options:
        raise BadSetting(name, value, f"must be one of {', '.join(options)}")
    return value


def _ascii(raw: str) -> str:
    """Raise ValueError for the digits of other scripts, which `int` and `float` take."""
    if not raw.isascii():
        raise ValueError(raw)
    return raw


def _check_range(name: str, raw: str, value: float, low: float, high: float | None) -> None:
    if value < low:
        raise BadSetting(name, raw, f"must be {low} or more")
    if high is not None and value > high:
        raise BadSetting(name, raw, f"must be {high} or less")
