"""An exact quantile over a sliding window of the latest numbers. Pure state."""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True)
class SlidingQuantile:
    """The latest `window` numbers (1 or more), in order of arrival and ascending. `add` costs O(window) moves."""

    window: int
    _latest: deque[float] = field(default_factory=deque)
    _ranked: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, value: float) -> None:
        """Add a number, and drop the oldest one if the window is full."""
        if len(self._latest) >= self.window:
            del self._ranked[bisect_left(self._ranked, self._latest.popleft())]
        self._latest.append(value)
        insort(self._ranked, value)

    def quantile(self, share: float) -> float:
        """Return the quantile `share` (above 0) by the nearest-rank method. There must be at least one number."""
        return self._ranked[ceil(len(self._ranked) * share) - 1]

    def check_integrity(self) -> None:
        """Assert that both orders hold the same numbers, at most `window`."""
        assert sorted(self._latest) == self._ranked
        assert len(self) <= self.window
