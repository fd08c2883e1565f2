"""A pause that doubles with each failure in a row, up to a bound. Who sleeps, and whose luck it is, is its user's."""

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
