"""When a read that takes long is asked a second time, and how often that may be. Pure: the caller's clock.

After Dean and Barroso, "The tail at scale" (2013): the limit comes from what reads of that size took lately, and a
budget keeps a store that is slow altogether from being asked twice for all.
"""

from dataclasses import dataclass
from typing import Final

from contracts.quantile import SlidingQuantile

WINDOW: Final = 200  # reads of a size that are remembered
ENOUGH: Final = 20  # from so many on, there is a limit


@dataclass(frozen=True, slots=True)
class HedgeRule:
    """A read is late after `factor` times the `quantile` of reads of its size, and not before `floor_s`. Of all reads
    at most `share` are asked again, at most `burst` of them saved up, and at most `at_once` under way.
    """

    share: float = 0.05
    quantile: float = 0.95
    factor: float = 2.0
    floor_s: float = 0.1
    burst: int = 8
    at_once: int = 4


class Hedging:
    """Call `began` for each read, `took` once it is known how long it took, or that it took longer than that."""

    def __init__(self, rule: HedgeRule) -> None:
        self.rule = rule
        self._recent: dict[int, SlidingQuantile] = {}  # by the number of bits of the size: within a factor of two
        self._saved = 0.0
        self._running = 0

    def __repr__(self) -> str:
        return f"<Hedging share={self.rule.share:g} saved={self._saved:.2f} running={self._running}>"

    def began(self, nbytes: int) -> float | None:
        """After how many seconds a read of so many bytes is late; None where too little is known."""
        self._saved = min(float(self.rule.burst), self._saved + self.rule.share)
        recent = self._recent.get(nbytes.bit_length())
        if recent is None or len(recent) < ENOUGH:
            return None
        return max(self.rule.floor_s, self.rule.factor * recent.of(self.rule.quantile))

    def took(self, nbytes: int, seconds: float) -> None:
        """A read came to its end, or was given up after so long."""
        self._recent.setdefault(nbytes.bit_length(), SlidingQuantile(WINDOW)).add(seconds)

    def try_hedge(self) -> bool:
        """Whether one may be asked again now; then `ended` follows."""
        if self._saved < 1.0 or self._running >= self.rule.at_once:
            return False
        self._saved -= 1.0
        self._running += 1
        return True

    def ended(self) -> None:
        """Neither of the two is under way any more."""
        self._running -= 1
