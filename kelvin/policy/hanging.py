"""Decide when a process hangs. Pure: what was seen of it is an argument."""

from dataclasses import dataclass
from typing import Final

SILENT_S: Final = 15.0  # of a process that has answered before
START_S: Final = 120.0  # of one that has not answered yet, unless it is given more: it imports, or brings up a database
LOOK_S_MAX: Final = 6.0  # counted for one look, however long it took


@dataclass(frozen=True, slots=True)
class Silence:
    """For how long a process has not answered, over several looks."""

    has_answered: bool = False
    silent_s: float = 0.0

    def after_look(self, answers: bool, look_s: float) -> "Silence":
        """Return the state after a look that ended `look_s` seconds after the one before.

        A look counts LOOK_S_MAX at most. If the supervisor itself gets no processor time, or the machine was paused,
        a single look may take minutes and says nothing about the process.
        """
        if answers:
            return Silence(has_answered=True)
        return Silence(self.has_answered, self.silent_s + min(look_s, LOOK_S_MAX))

    def hangs(self, start_s: float) -> bool:
        """Whether it was silent for SILENT_S seconds, or for `start_s` if it has never answered."""
        return self.silent_s >= (SILENT_S if self.has_answered else start_s)
