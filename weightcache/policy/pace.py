"""How fast a source moves bytes, measured as they move. Pure: whoever moves them says when.

What counts is what a source does for us altogether, not the rate of one transfer: eight at once are each slow, and the
ninth waits for them. A transfer's own rate, times how many there were at once, is that of all of them (Little, 1961);
unlike bytes over time it does not matter whether they end one by one or together.
"""

from dataclasses import dataclass
from typing import Final

WEIGHT: Final = 0.3  # of the newest transfer; the rest is what was known before


@dataclass(frozen=True, slots=True)
class Transfer:
    """One that is under way."""

    began: float
    seen: float  # transfers under way, times seconds, by then


@dataclass(slots=True)
class Pace:
    """Bytes per second while something is under way, as a moving average; None before the first."""

    rate: float | None = None
    _under_way: int = 0
    _seen: float = 0.0
    _at: float = 0.0

    def begin(self, now: float) -> Transfer:
        """A transfer was asked for."""
        self._look(now)
        self._under_way += 1
        return Transfer(now, self._seen)

    def end(self, transfer: Transfer, moved: int, now: float) -> None:
        """It is over, and so many bytes came; 0 teaches nothing: a refusal is not a slow transfer."""
        self._look(now)
        self._under_way -= 1
        took_s = now - transfer.began
        if moved and took_s > 0:
            at_once = (self._seen - transfer.seen) / took_s  # on average, itself included
            sample = moved / took_s * at_once
            self.rate = sample if self.rate is None else WEIGHT * sample + (1 - WEIGHT) * self.rate

    def _look(self, now: float) -> None:
        self._seen += self._under_way * (now - self._at)
        self._at = now
