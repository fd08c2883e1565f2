"""Medians with intervals, and quantiles, for any distribution. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Median:
    """A median with a 95 % interval from order statistics (the sign test's; exact for any distribution)."""

    median: float
    low: float
    high: float
    n: int


def median_of(values: Sequence[float]) -> Median:
    """Return the median. Raises ValueError without values. With fewer than six values the interval is their range."""
    if not values:
        raise ValueError("no values")
    ordered, n = sorted(values), len(values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    rank = _rank(n)
    return Median(middle, ordered[rank], ordered[n - 1 - rank], n)


def _rank(n: int, confidence: float = 0.95) -> int:
    """Return the largest rank k whose interval (x[k], x[n-1-k]) covers the median with `confidence`."""
    tail, rank = 0.0, 0
    for k in range(n // 2):
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        rank = k
    return rank


def quantile_of(values: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least `part` (0 to 1) of the values don't exceed. None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index (DEC-TR-301, 1984): 1 if all shares are equal, `1 / n` if one has everything."""
    squares = len(shares) * sum(share**2 for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0
