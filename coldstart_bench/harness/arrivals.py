"""Compute when requests are due: at once, steady, random, or as in a trace. Times are µs after the start. Pure."""

import math
from collections.abc import Sequence
from random import Random
from typing import Final

_US: Final = 1_000_000


def at_once(count: int) -> list[int]:
    """Return `count` zeros: all requests are due at the start."""
    return [0] * count


def constant(rate: float, seconds: float) -> list[int]:
    """Return evenly spaced arrivals, `rate` per second from 0 on."""
    return [int(number / rate * _US) for number in range(int(rate * seconds))]


def poisson(rate: float, seconds: float, chance: Random) -> list[int]:
    """Return arrivals of a Poisson process with `rate` per second."""
    return renewal(rate, 1.0, "Gamma", seconds, chance)


def renewal(rate: float, cv: float, pattern: str, seconds: float, chance: Random) -> list[int]:
    """Return arrivals with gaps of mean `1 / rate` and coefficient of variation `cv`. Empty if either is 0. `pattern`
    is the gaps' distribution, `Gamma` or `Weibull`; raises ValueError for another one.
    """
    if rate <= 0 or cv <= 0:
        return []
    if pattern == "Gamma":
        shape = 1 / cv**2

        def gap() -> float:
            return chance.gammavariate(shape, 1 / (rate * shape))

    elif pattern == "Weibull":
        shape = weibull_shape(cv)
        scale = 1 / (rate * math.gamma(1 + 1 / shape))

        def gap() -> float:
            return chance.weibullvariate(scale, shape)

    else:
        raise ValueError(f"{pattern}: must be Gamma or Weibull")
    found, at_s = [], gap()
    while at_s < seconds:
        found.append(int(at_s * _US))
        at_s += gap()
    return found


def weibull_shape(cv: float) -> float:
    """Return the shape of a Weibull distribution with coefficient of variation `cv`, by bisection."""
    low, high = 0.05, 50.0  # the shape falls as cv grows
    for _ in range(80):
        middle = (low + high) / 2
        log_ratio = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        if math.expm1(log_ratio) > cv**2:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def replayed(at_s: Sequence[float], speed: float) -> list[int]:
    """Return the same gaps, `speed` times as fast. The first request is due at 0."""
    first = at_s[0] if at_s else 0.0
    return [int((each - first) / speed * _US) for each in at_s]
