"""When a process that died is started again. Pure: time is an argument."""

from dataclasses import dataclass
from typing import Final

from contracts.doubling import Doubling

FIRST_DELAY_S: Final = 0.0
LONGEST_S: Final = 5.0
PAUSES: Final = Doubling(0.2, LONGEST_S)
STEADY_S: Final = 30.0  # a life this long forgets the deaths before it


@dataclass(frozen=True, slots=True)
class Restarts:
    """Deaths in a row, none of which followed a steady life."""

    deaths: int = 0

    def after_death(self, lived_s: float) -> "Restarts":
        """Count this death, or begin again where the life had been a steady one."""
        return Restarts(1 if lived_s >= STEADY_S else self.deaths + 1)

    @property
    def delay_s(self) -> float:
        """At once for the first death, then doubling up to LONGEST_S."""
        if self.deaths <= 1:
            return FIRST_DELAY_S
        return PAUSES.after(self.deaths - 1)
