"""Decide when a first frame is late enough for a hedged request: after the 95th percentile of recent first frames.

By definition one request in twenty is that late, so hedging costs little for what it saves (Dean and Barroso, "The tail
at scale", 2013). The percentile is exact over a sliding window. For a hedged request, the whole wait counts, also if
the second replica answered. Otherwise each hedge would make the next one earlier.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kelvin.contracts.sliding_quantile import SlidingQuantile


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """How many samples are needed and kept."""

    min_samples: int = 100  # needed before any request counts as late
    window: int = 256
    percentile: float = 0.95  # fraction of first frames that are not late
    shortest_late_s: float = 0.01  # a faster first frame is never late
    max_windows: int = 512  # windows kept; the least recently used is dropped


LIMITS: Final = HedgeLimits()


K = TypeVar("K", bound=Hashable)


class FirstFrameLatencies(Generic[K]):
    """Seconds from dispatch to first frame of warm requests, in one sliding window per kind."""

    def __init__(self, limits: HedgeLimits = LIMITS) -> None:
        self._limits = limits
        self._windows: OrderedDict[K, SlidingQuantile] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FirstFrameLatencies kinds={len(self._windows)}>"

    def record_first_frame(self, kind: K, seconds: float) -> None:
        """Add one measurement to the window of its kind."""
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= self._limits.max_windows:
                self._windows.popitem(last=False)
            window = self._windows[kind] = SlidingQuantile(self._limits.window)
        else:
            self._windows.move_to_end(kind)
        window.add(seconds)

    def late_after_s(self, kind: K) -> float | None:
        """Return the seconds after which a first frame is late, or None without enough samples."""
        window, limits = self._windows.get(kind), self._limits
        if window is None or len(window) < limits.min_samples:
            return None
        return max(limits.shortest_late_s, window.quantile(limits.percentile))

    def check_integrity(self) -> None:
        """Assert that every window is consistent, and that their number is bounded."""
        assert len(self._windows) <= self._limits.max_windows
        for window in self._windows.values():
            window.check_integrity()
            assert len(window) >= 1


def hedge_after_s(late_after_s: float | None, remaining_s: float, *, is_cold: bool) -> float | None:
    """Return the seconds after dispatch at which to start the second attempt, or None for never. A cold request is slow
    for reasons that another replica shares. A response after the deadline is useless.
    """
    if late_after_s is None or is_cold or late_after_s >= remaining_s:
        return None
    return late_after_s
