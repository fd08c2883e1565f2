"""What doubles with each failure in a row: a pause, up to a bound; and how many pass before the next one is told.

Who sleeps, and whose luck it is, is its user's.
"""

from dataclasses import dataclass
from typing import Final

_MANY: Final = 64  # doublings; more would only be a larger number


@dataclass(frozen=True, slots=True)
class Doubling:
    """Seconds."""

    first_s: float
    longest_s: float

    def after(self, failures: int, luck: float = 0.0) -> float:
        """After so many failures (1 or more), less up to a half by `luck` in [0, 1]: not all come again at once."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MANY)) * (1 - luck / 2)


def is_told(failures: int) -> bool:
    """Whether the latest of so many failures in a row (1 or more) is worth a line: the 1st, 2nd, 4th, 8th, ... is."""
    return failures & (failures - 1) == 0
