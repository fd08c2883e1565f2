"""A token bucket: units flow in at a steady rate, up to a size. Pure: rate, size and time are arguments.

Its state is one number, the time at which the bucket is full again (generic cell rate algorithm, ITU-T I.371). So a
bucket needs no tick, and its rate and size may change at any time. If every caller waits for `wait_s` first, then in
any t seconds at most the inflow of t seconds plus `size` units are taken.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

ROUNDING: Final = 1e-7  # units; too few to wait for


@dataclass(slots=True)
class TokenBucket:
    """A new bucket is full. Times are seconds of one clock; a clock that steps back adds no units."""

    full_at_s: float = -inf

    def missing(self, unit_s: float, now_s: float) -> float:
        """Return how many units the bucket lacks until it is full, if one flows in every `unit_s` seconds."""
        return max(0.0, self.full_at_s - now_s) / unit_s

    def wait_s(self, units: float, size: float, unit_s: float, now_s: float) -> float:
        """Return the seconds until `units` are available, if no other caller takes any; 0.0: they are available now."""
        lacking = self.missing(unit_s, now_s) + units - size
        return lacking * unit_s if lacking > ROUNDING else 0.0

    def take(self, units: float, unit_s: float, now_s: float) -> None:
        """Take `units`. If some are not available, the bucket goes into debt, which later inflow pays."""
        self.full_at_s = max(self.full_at_s, now_s) + units * unit_s
