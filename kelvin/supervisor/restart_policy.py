"""When a process hangs, and when one that died is started again. Pure: what was seen, and time, are arguments."""

from dataclasses import dataclass
from typing import Final

from kelvin.contracts.backoff import ExponentialBackoff

FIRST_DELAY_S: Final = 0.0
MAX_DELAY_S: Final = 5.0
RESTART_BACKOFF: Final = ExponentialBackoff(0.2, MAX_DELAY_S)
STEADY_S: Final = 30.0  # a life this long forgets the deaths before it
SILENT_S: Final = 15.0  # of a process that has answered before
START_S: Final = 120.0  # of one that has not answered yet, unless it is given more: it imports, or brings up a database
COUNTED_PROBE_S_MAX: Final = 6.0  # counted for one look, however long it took


@dataclass(frozen=True, slots=True)
class Restarts:
    """Deaths in a row, none of which followed a steady life."""

    deaths: int = 0

    def after_death(self, lived_s: float) -> "Restarts":
        """Count this death, or begin again where the life had been a steady one."""
        return Restarts(1 if lived_s >= STEADY_S else self.deaths + 1)

    @property
    def delay_s(self) -> float:
        """At once for the first death, then doubling up to MAX_DELAY_S."""
        if self.deaths <= 1:
            return FIRST_DELAY_S
        return RESTART_BACKOFF.after(self.deaths - 1)


@dataclass(frozen=True, slots=True)
class SilenceTimer:
    """For how long a process has not answered, over several looks."""

    has_answered: bool = False
    silent_s: float = 0.0

    def after_probe(self, answers: bool, probe_s: float) -> "SilenceTimer":
        """Return the state after a look that ended `probe_s` seconds after the one before.

        A look counts COUNTED_PROBE_S_MAX at most. If the supervisor itself gets no processor time, or the machine was
        paused, a single look may take minutes and says nothing about the process.
        """
        if answers:
            return SilenceTimer(has_answered=True)
        return SilenceTimer(self.has_answered, self.silent_s + min(probe_s, COUNTED_PROBE_S_MAX))

    def hangs(self, start_s: float) -> bool:
        """Whether it was silent for SILENT_S seconds, or for `start_s` if it has never answered."""
        return self.silent_s >= (SILENT_S if self.has_answered else start_s)
