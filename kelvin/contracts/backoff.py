"""Exponential back-off: the pause after consecutive failures, and which of these failures are worth a log line.

Pure: the caller sleeps, and draws the random number.
"""

from dataclasses import dataclass
from typing import Final

_MAX_EXPONENT: Final = 64  # limit of doublings; keeps the number finite


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A pause that doubles from `first_s` up to `longest_s`, both in seconds."""

    first_s: float
    longest_s: float

    def delay_s(self, failures: int, jitter: float = 0.0) -> float:
        """Return the pause in seconds after `failures` (1 or more). `jitter` in [0, 1] shortens it by up to a half."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MAX_EXPONENT)) * (1 - jitter / 2)


def should_log(failures: int) -> bool:
    """Return whether to log the latest of so many consecutive failures: the 1st, 2nd, 4th, 8th, ..."""
    return failures & (failures - 1) == 0
