"""Exponential back-off: the pause after failures in a row, and which of these failures are worth a log line.

Pure: the caller sleeps, and draws the random number.
"""

from dataclasses import dataclass
from typing import Final

_MAX_EXPONENT: Final = 64  # doublings; more would only be a larger number


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A pause that doubles from `first_s` up to `longest_s`, both in seconds."""

    first_s: float
    longest_s: float

    def after(self, failures: int, jitter: float = 0.0) -> float:
        """Return the pause in seconds after so many failures (1 or more), less up to a half by `jitter`, from
        [0, 1].
        """
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MAX_EXPONENT)) * (1 - jitter / 2)


def should_log(failures: int) -> bool:
    """Whether the latest of so many failures in a row (1 or more) is worth a line: the 1st, 2nd, 4th, 8th, ... is."""
    return failures & (failures - 1) == 0
