"""How fast a source moves bytes, measured as they move. Pure: whoever moves them says when.

What counts is what a source does for us altogether, not the rate of one transfer: eight at once are each slow, and the
ninth waits for them.
"""

from dataclasses import dataclass
from typing import Final

WEIGHT: Final = 0.3  # of the newest sample; the rest is what was known before
FEW: Final = 3  # samples
SAMPLE_S: Final = 0.02  # shorter stretches tell more of the clock than of the source


@dataclass(slots=True)
class Pace:
    """Bytes per second over the times in which something was under way, as a moving average; None before the first.

    It is gone by after a few samples: the first ones tell of connections that were made.
    """

    rate: float | None = None
    queued: int = 0  # bytes under way
    _samples: int = 0
    _moved: int = 0  # since the last sample
    _busy_s: float = 0.0
    _since: float = 0.0

    def begin(self, nbytes: int, now: float) -> None:
        """A transfer was asked for."""
        if self.queued == 0:
            self._since = now  # an idle source is not a slow one
        self.queued += nbytes

    def end(self, nbytes: int, moved: int, now: float) -> None:
        """It is over: of `nbytes` that were asked for so many came."""
        self.queued -= nbytes
        if moved or self.queued:  # a refusal is not a slow transfer
            self._moved += moved
            self._busy_s += now - self._since
        self._since = now
        if self._moved and self._busy_s >= SAMPLE_S:
            sample = self._moved / self._busy_s
            self.rate = sample if self.rate is None else WEIGHT * sample + (1 - WEIGHT) * self.rate
            self._samples += 1
            self._moved, self._busy_s = 0, 0.0

    def expected_s(self, nbytes: int) -> float | None:
        """Until that many more bytes would be here, behind those under way; None where too little was measured yet."""
        if self.rate is None or self._samples < FEW:
            return None
        return (self.queued + nbytes) / max(self.rate, 1.0)
