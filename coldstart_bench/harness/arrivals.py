"""When requests are due: at once, at a steady rate, at random, or as a trace has it. Pure; chance is an argument."""

import math
from collections.abc import Sequence
from random import Random
from typing import Final

_US: Final = 1_000_000


def at_once(count: int) -> list[int]:
    """Microseconds after the beginning: all at 0."""
    return [0] * count


def constant(rate: float, seconds: float) -> list[int]:
    """`rate` a second, evenly, from 0 on."""
    return [int(number / rate * _US) for number in range(int(rate * seconds))]


def poisson(rate: float, seconds: float, chance: Random) -> list[int]:
    """`rate` a second at the mean, each independent of the others."""
    return renewal(rate, 1.0, "Gamma", seconds, chance)


def renewal(rate: float, cv: float, pattern: str, seconds: float, chance: Random) -> list[int]:
    """Gaps of mean `1 / rate` and coefficient of variation `cv`: `Gamma` or `Weibull` distributed. None at rate 0.

    Raises ValueError for another pattern.
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
    """The shape of a Weibull distribution with that coefficient of variation, by bisection; it falls as cv grows."""
    low, high = 0.05, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        log_ratio = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        if math.expm1(log_ratio) > cv**2:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def replayed(at_s: Sequence[float], speed: float) -> list[int]:
    """The same gaps, `speed` times as fast; the first is due at 0."""
    first = at_s[0] if at_s else 0.0
    return [int((each - first) / speed * _US) for each in at_s]
