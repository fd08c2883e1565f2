"""A token bucket: units flow in at a steady rate, up to a size. Pure: rate, size and time are arguments.

Kept as one number, the time at which the bucket is full again (generic cell rate algorithm, ITU-T I.371). So a bucket
needs no tick, and its rate and size may change at any time. In any span of t seconds as many units are taken as flow in
meanwhile, and `size` more, if each taker waits for `wait_s` first.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

ROUNDING: Final = 1e-7  # units; nobody waits for so little


@dataclass(slots=True)
class TokenBucket:
    """A new bucket is full. Times are seconds of one clock; a clock that steps back brings no units."""

    full_at_s: float = -inf

    def missing(self, unit_s: float, now_s: float) -> float:
        """Return how many units lack for a full bucket, if one flows in each `unit_s` seconds."""
        return max(0.0, self.full_at_s - now_s) / unit_s

    def wait_s(self, units: float, size: float, unit_s: float, now_s: float) -> float:
        """Return the seconds until `units` are there, if nobody takes any meanwhile; 0.0: they are there now."""
        lacking = self.missing(unit_s, now_s) + units - size
        return lacking * unit_s if lacking > ROUNDING else 0.0

    def take(self, units: float, unit_s: float, now_s: float) -> None:
        """Take `units`. Those that are not there are owed: they are paid by what flows in."""
        self.full_at_s = max(self.full_at_s, now_s) + units * unit_s
