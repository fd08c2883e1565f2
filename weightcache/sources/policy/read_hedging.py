"""Decide when a read of the store is late, and whether it may be hedged by a second one. Pure: no clock.

After Dean and Barroso, "The tail at scale" (2013). The limit comes from recent reads of that size. A budget prevents a
second read for every read of a store that is slow for all.
"""

from dataclasses import dataclass
from typing import Final

from kelvin.contracts.sliding_quantile import SlidingQuantile

WINDOW: Final = 200  # recent reads per size
MIN_SAMPLES: Final = 20  # fewest reads for a limit


@dataclass(frozen=True, slots=True)
class HedgeRule:
    """A read is late after `factor` times the `quantile` of reads of its size, but not before `floor_s`. At most
    `share` of all reads are hedged. Up to `burst` unused hedges are saved, and `at_once` run at the same time.
    """

    share: float = 0.05
    quantile: float = 0.95
    factor: float = 2.0
    floor_s: float = 0.1
    burst: int = 8
    at_once: int = 4


class ReadHedging:
    """Hedging state of one store. Call `begin_read` for each read, `record_read` with its duration or a lower bound."""

    def __init__(self, rule: HedgeRule) -> None:
        self.rule = rule
        self._recent: dict[int, SlidingQuantile] = {}  # by the number of bits of the size: within a factor of two
        self._saved_hedges = 0.0
        self._running = 0

    def __repr__(self) -> str:
        return f"<ReadHedging share={self.rule.share:g} saved={self._saved_hedges:.2f} running={self._running}>"

    def begin_read(self, nbytes: int) -> float | None:
        """Count a read of `nbytes` that begins, which adds `share` to the budget. Return after how many seconds it is
        late; None if too few reads of that size are known.
        """
        self._saved_hedges = min(float(self.rule.burst), self._saved_hedges + self.rule.share)
        recent = self._recent.get(nbytes.bit_length())
        if recent is None or len(recent) < MIN_SAMPLES:
            return None
        return max(self.rule.floor_s, self.rule.factor * recent.quantile(self.rule.quantile))

    def record_read(self, nbytes: int, seconds: float) -> None:
        """Record that a read ended, or was given up, after `seconds`."""
        self._recent.setdefault(nbytes.bit_length(), SlidingQuantile(WINDOW)).add(seconds)

    def try_hedge(self) -> bool:
        """Take a hedge from the budget. Return False if none is left. Otherwise call `end_hedge` after both reads."""
        if self._saved_hedges < 1.0 or self._running >= self.rule.at_once:
            return False
        self._saved_hedges -= 1.0
        self._running += 1
        return True

    def end_hedge(self) -> None:
        """Record that a hedged read and its second read have ended."""
        self._running -= 1
