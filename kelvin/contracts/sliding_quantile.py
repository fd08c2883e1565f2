"""An exact quantile over a sliding window of the latest numbers. Pure state."""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True)
class SlidingQuantile:
    """The latest `window` numbers (1 or more), as they came and in order. Each one costs O(window) moves of memory."""

    window: int
    _latest: deque[float] = field(default_factory=deque)
    _ranked: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, value: float) -> None:
        """Add a number, and forget the oldest one if there are too many."""
        if len(self._latest) >= self.window:
            del self._ranked[bisect_left(self._ranked, self._latest.popleft())]
        self._latest.append(value)
        insort(self._ranked, value)

    def of(self, share: float) -> float:
        """Return the smallest number that at least `share` (above 0) of them do not exceed (nearest rank). There must
        be one.
        """
        return self._ranked[ceil(len(self._ranked) * share) - 1]

    def check_integrity(self) -> None:
        """Both orders hold the same numbers, no more than the window."""
        assert sorted(self._latest) == self._ranked
        assert len(self) <= self.window
