"""Decide when a process counts as hung, and when a dead one is restarted. Pure: observations and time are arguments."""

from dataclasses import dataclass
from typing import Final

from kelvin.contracts.backoff import ExponentialBackoff

FIRST_DELAY_S: Final = 0.0
MAX_DELAY_S: Final = 5.0
RESTART_BACKOFF: Final = ExponentialBackoff(0.2, MAX_DELAY_S)
STEADY_S: Final = 30.0  # after a run this long, earlier deaths no longer count
SILENT_S: Final = 15.0  # limit for a process that has answered before
START_S: Final = 120.0  # default limit for the first answer: the process imports modules, or upgrades a database
COUNTED_PROBE_S_MAX: Final = 6.0  # the most that one probe adds to the silence


@dataclass(frozen=True, slots=True)
class Restarts:
    """Number of deaths in a row, none after a steady run."""

    deaths: int = 0

    def after_death(self, lived_s: float) -> "Restarts":
        """Count this death. After a steady run, counting begins again."""
        return Restarts(1 if lived_s >= STEADY_S else self.deaths + 1)

    @property
    def delay_s(self) -> float:
        """Return 0 for the first death, then a delay that doubles up to MAX_DELAY_S."""
        if self.deaths <= 1:
            return FIRST_DELAY_S
        return RESTART_BACKOFF.delay_s(self.deaths - 1)


@dataclass(frozen=True, slots=True)
class SilenceTimer:
    """For how long a process has not answered, over several probes."""

    has_answered: bool = False
    silent_s: float = 0.0

    def after_probe(self, answers: bool, probe_s: float) -> "SilenceTimer":
        """Return the state after a probe that ended `probe_s` seconds after the previous one.

        A probe counts at most COUNTED_PROBE_S_MAX. If the supervisor gets no CPU time, or the machine was paused, a
        single probe may take minutes and says nothing about the process.
        """
        if answers:
            return SilenceTimer(has_answered=True)
        return SilenceTimer(self.has_answered, self.silent_s + min(probe_s, COUNTED_PROBE_S_MAX))

    def is_hung(self, start_s: float) -> bool:
        """Return whether it was silent for SILENT_S seconds, or for `start_s` if it has never answered."""
        return self.silent_s >= (SILENT_S if self.has_answered else start_s)
