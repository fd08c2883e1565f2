"""How starts and jobs drew on the pool of standbys of one device class, as far back as it is remembered.

Kept are the rate of takes, how long it takes until one that was taken is made up for, and how many were outstanding
at each take. Times are seconds of one clock; the caller says what time it is. Pure but for the state of
`StandbyDemand`.
"""

from collections import deque
from dataclasses import dataclass
from math import exp
from typing import Final

MEMORY_S: Final = 4 * 3600.0  # e-folding time: a burst of three models is forgotten within a day
RECENT_S: Final = 60.0  # the same for a rate that rises; the larger of the two rates counts
MAX_OUTSTANDING: Final = 64  # outstanding at once that are told apart
DEFAULT_REPLACE_S: Final = 0.5  # until a standby is made up for; before any was
MAX_REPLACE_S: Final = 60.0  # a zygote that is away says nothing of the next replacement
_PRIOR: Final = 1.0  # weight of a take that was alone and never was: without news, bursts are forgotten
_SHARE: Final = 0.2  # of a new replacement time in their average


@dataclass(frozen=True, slots=True)
class DemandEstimate:
    """What is known at one moment. `outstanding_weights[k]` is the weight of takes at which k + 1 were outstanding."""

    per_s: float
    replace_s: float
    outstanding_weights: tuple[float, ...]


class StandbyDemand:
    """Takes of standbys, each outstanding until it is made up for. Its size is bounded by MAX_OUTSTANDING."""

    def __init__(self) -> None:
        self._outstanding: deque[float] = deque(maxlen=MAX_OUTSTANDING)  # when each was taken
        self._outstanding_weights = [0.0] * MAX_OUTSTANDING
        self._recent_takes = 0.0  # takes, each weighing less the longer it is ago
        self._decayed_at_s: float | None = None  # when the weights were right
        self._replace_s = DEFAULT_REPLACE_S

    def __repr__(self) -> str:
        return f"<StandbyDemand outstanding={len(self._outstanding)} replaced in {self._replace_s:.3g} s>"

    def record_take(self, now_s: float) -> None:
        """A start or a job took a standby, or found none and waits for one."""
        self._decay(now_s)
        self._outstanding.append(now_s)
        self._outstanding_weights[len(self._outstanding) - 1] += 1.0
        self._recent_takes += 1.0

    def record_replacement(self, now_s: float) -> None:
        """One was born and is parked: the longest outstanding take is made up for, where there is any."""
        if self._outstanding:
            took_s = min(MAX_REPLACE_S, max(0.0, now_s - self._outstanding.popleft()))
            self._replace_s += _SHARE * (took_s - self._replace_s)

    def clear_outstanding(self) -> None:
        """The pool is as large as it should be: nothing is outstanding."""
        self._outstanding.clear()

    def estimate(self, now_s: float) -> DemandEstimate:
        """What is known now."""
        self._decay(now_s)
        per_s = max(sum(self._outstanding_weights) / MEMORY_S, self._recent_takes / RECENT_S)
        alone, *more = self._outstanding_weights
        return DemandEstimate(per_s, self._replace_s, (alone + _PRIOR, *more))

    def check_integrity(self) -> None:
        """Weights are none below zero, and no take is outstanding that was never counted."""
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
