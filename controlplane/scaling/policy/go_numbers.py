"""Arithmetic as the autoscaler's source has it, where Python's is another: nothing here raises, whatever the operands.

Facts of the Go language and its package math, on amd64: division and rounding follow IEEE 754, and a float that fits no
int32 becomes the least one (the instruction's "indefinite integer").
"""

from math import ceil, copysign, floor, inf, isfinite, isnan, nan, trunc
from typing import Final

NANOSECONDS: Final = 10**9
INT32_MIN: Final = -(2**31)
_INT32_END: Final = 2**31
_MICRO: Final = 1e6


def go_divide(dividend: float, divisor: float) -> float:
    """IEEE 754: by zero it is infinite, and zero by zero is not a number."""
    if divisor:
        return dividend / divisor
    if isnan(dividend) or not dividend:
        return nan
    return copysign(inf, dividend) * copysign(1.0, divisor)


def go_ceil(value: float) -> float:
    """The least whole number that is not less; infinite and NaN as they are."""
    try:
        return ceil(value)
    except (OverflowError, ValueError):
        return value


def go_floor(value: float) -> float:
    """The largest whole number that is not more; infinite and NaN as they are."""
    try:
        return floor(value)
    except (OverflowError, ValueError):
        return value


def go_max(one: float, other: float) -> float:
    """NaN where either is, but for infinity, which is larger than anything."""
    if one != one or other != other:  # NaN; asked of each decision, and a call takes longer
        return inf if inf in (one, other) else nan
    return one if one > other else other


def go_min(one: float, other: float) -> float:
    """NaN where either is, but for negative infinity."""
    return -go_max(-one, -other)


def int32(value: float) -> int:
    """Towards zero; what does not fit, and NaN, is the least int32."""
    return int(value) if INT32_MIN - 1 < value < _INT32_END else INT32_MIN


def to_nanoseconds(seconds: float) -> int:
    """As Go's times and durations are: sums of decimal fractions compare exactly."""
    return round(seconds * NANOSECONDS)


def go_power(base: float, exponent: int) -> float:
    """Squared and multiplied from the exponent's lowest bit on, as Go does it: the same last digit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def round_to_micro(value: float) -> float:
    """Rounded to six digits behind the point, halves away from zero."""
    scaled = value * _MICRO
    if not isfinite(scaled):
        return scaled
    whole = trunc(scaled)
    if abs(scaled - whole) >= 0.5:
        whole += 1 if scaled > 0 else -1
    return whole / _MICRO
