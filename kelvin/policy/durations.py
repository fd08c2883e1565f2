"""Durations as people write them: `90d`, `24h`, `30m`, `45s`."""

import re
from typing import Final

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")


def parse_duration_s(text: str) -> int:
    """Whole seconds. Raises ValueError naming value and rule."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]}: must be a whole number and one of s, m, h, d, such as 24h")
    return int(found[1]) * _UNITS[found[2]]
