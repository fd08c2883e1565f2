"""When a first frame is late enough to ask a second replica for it: past the 95th percentile of what they took lately.

By that very measure one in twenty is asked twice, so a second request costs little of what it saves (Dean and Barroso,
"The tail at scale", 2013). The percentile is exact, over a window of the latest; of what a second replica answered the
whole wait counts, or each hedge would make the next one earlier.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kelvin.contracts.sliding_quantile import SlidingQuantile


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """How much has to be known, and is kept."""

    samples: int = 100  # before anything is late
    window: int = 256
    share: float = 0.95  # of first frames that are not late
    least_s: float = 0.01  # what is quicker than that is never late
    versions: int = 512  # that are kept; the one that was used longest ago is forgotten


LIMITS: Final = HedgeLimits()


Of = TypeVar("Of", bound=Hashable)


class FirstFrameLatencies(Generic[Of]):
    """How long warm requests waited for their first frame once they were sent, for each kind of them."""

    def __init__(self, limits: HedgeLimits = LIMITS) -> None:
        self._limits = limits
        self._windows: OrderedDict[Of, SlidingQuantile] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FirstFrameLatencies kinds={len(self._windows)}>"

    def record_first_frame(self, kind: Of, seconds: float) -> None:
        """One has come."""
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= self._limits.versions:
                self._windows.popitem(last=False)
            window = self._windows[kind] = SlidingQuantile(self._limits.window)
        else:
            self._windows.move_to_end(kind)
        window.add(seconds)

    def late_after_s(self, kind: Of) -> float | None:
        """From when on one is late; None while too little is known."""
        window, limits = self._windows.get(kind), self._limits
        if window is None or len(window) < limits.samples:
            return None
        return max(limits.least_s, window.of(limits.share))

    def check_integrity(self) -> None:
        """Every window is sound; all is bounded."""
        assert len(self._windows) <= self._limits.versions
        for window in self._windows.values():
            window.check_integrity()
            assert len(window) >= 1


def hedge_after_s(late_after_s: float | None, remaining_s: float, *, is_cold: bool) -> float | None:
    """How long after it was sent a second replica is asked; None: never. What waited for a start is slow for reasons
    that another replica has as well; an answer after the deadline is worth nothing.
    """
    if late_after_s is None or is_cold or late_after_s >= remaining_s:
        return None
    return late_after_s
