"""Measure how starts and jobs take standbys from the pool of one device class, with exponential forgetting.

It keeps the rate of takes, how long a replacement takes, and how many takes were outstanding at each take. A take is
outstanding until its replacement is parked. Times are seconds of one clock, given by the caller. Pure but for the state
of `StandbyDemand`.
"""

from collections import deque
from dataclasses import dataclass
from math import exp
from typing import Final

MEMORY_S: Final = 4 * 3600.0  # e-folding time: a burst of three models is forgotten within a day
RECENT_S: Final = 60.0  # e-folding time of the recent rate; the larger of the two rates counts
MAX_OUTSTANDING: Final = 64  # larger numbers of outstanding takes are not told apart
DEFAULT_REPLACE_S: Final = 0.5  # time of a replacement before any was measured
MAX_REPLACE_S: Final = 60.0  # an outage of the zygote says nothing about the next replacement
_PRIOR: Final = 1.0  # weight of an imaginary lone take, so that old bursts are forgotten
_SHARE: Final = 0.2  # weight of a new replacement time in the average


@dataclass(frozen=True, slots=True)
class DemandEstimate:
    """The estimate at one moment. `outstanding_weights[k]` is the weight of takes that made k + 1 outstanding."""

    per_s: float
    replace_s: float
    outstanding_weights: tuple[float, ...]


class StandbyDemand:
    """Takes of standbys, each outstanding until it is replaced. Memory is bounded by MAX_OUTSTANDING."""

    def __init__(self) -> None:
        self._outstanding: deque[float] = deque(maxlen=MAX_OUTSTANDING)  # time of each take
        self._outstanding_weights = [0.0] * MAX_OUTSTANDING
        self._recent_takes = 0.0  # decayed number of takes
        self._decayed_at_s: float | None = None  # when the weights were last decayed
        self._replace_s = DEFAULT_REPLACE_S

    def __repr__(self) -> str:
        return f"<StandbyDemand outstanding={len(self._outstanding)} replaced in {self._replace_s:.3g} s>"

    def record_take(self, now_s: float) -> None:
        """Record that a start or a job took a standby, or found none and waits for one."""
        self._decay(now_s)
        self._outstanding.append(now_s)
        self._outstanding_weights[len(self._outstanding) - 1] += 1.0
        self._recent_takes += 1.0

    def record_replacement(self, now_s: float) -> None:
        """Record that a new standby is parked. It replaces the take that has been outstanding longest, if any."""
        if self._outstanding:
            took_s = min(MAX_REPLACE_S, max(0.0, now_s - self._outstanding.popleft()))
            self._replace_s += _SHARE * (took_s - self._replace_s)

    def clear_outstanding(self) -> None:
        """Forget outstanding takes, because the pool has its full size."""
        self._outstanding.clear()

    def estimate(self, now_s: float) -> DemandEstimate:
        """Return the estimate at `now_s`."""
        self._decay(now_s)
        per_s = max(sum(self._outstanding_weights) / MEMORY_S, self._recent_takes / RECENT_S)
        alone, *more = self._outstanding_weights
        return DemandEstimate(per_s, self._replace_s, (alone + _PRIOR, *more))

    def check_integrity(self) -> None:
        """Assert that no weight is negative, and that outstanding takes are bounded."""
        assert min(self._outstanding_weights) >= 0.0
        assert self._recent_takes >= 0.0
        assert len(self._outstanding) <= MAX_OUTSTANDING

    def _decay(self, now_s: float) -> None:
        if self._decayed_at_s is None:
            self._decayed_at_s = now_s
        passed_s = max(0.0, now_s - self._decayed_at_s)
        if passed_s:
            left = exp(-passed_s / MEMORY_S)
            self._outstanding_weights = [weight * left for weight in self._outstanding_weights]
            self._recent_takes *= exp(-passed_s / RECENT_S)
            self._decayed_at_s = now_s
