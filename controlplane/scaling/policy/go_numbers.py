"""Arithmetic of Go where Python's differs, for code that follows Knative. No function raises, whatever the operands.

Facts of the Go language and its package math, on amd64: division and rounding follow IEEE 754. A float that fits no
int32 becomes the least int32 (the instruction's "indefinite integer").
"""

from math import ceil, copysign, floor, inf, isfinite, isnan, nan, trunc
from typing import Final

NANOSECONDS: Final = 10**9
INT32_MIN: Final = -(2**31)
_INT32_END: Final = 2**31
_MICRO: Final = 1e6


def go_divide(dividend: float, divisor: float) -> float:
    """Divide as in IEEE 754: x/0 is infinite, and 0/0 is NaN."""
    if divisor:
        return dividend / divisor
    if isnan(dividend) or not dividend:
        return nan
    return copysign(inf, dividend) * copysign(1.0, divisor)


def go_ceil(value: float) -> float:
    """Return the least whole number that is not less than `value`. Infinity and NaN stay as they are."""
    try:
        return ceil(value)
    except (OverflowError, ValueError):
        return value


def go_floor(value: float) -> float:
    """Return the largest whole number that is not more than `value`. Infinity and NaN stay as they are."""
    try:
        return floor(value)
    except (OverflowError, ValueError):
        return value


def go_max(left: float, right: float) -> float:
    """Return the larger one; NaN if either is NaN, unless the other is infinity, which is larger than anything."""
    if left != left or right != right:  # NaN; inlined, because this runs for each decision and `isnan` is slower
        return inf if inf in (left, right) else nan
    return left if left > right else right


def go_min(left: float, right: float) -> float:
    """Return the smaller one; NaN if either is NaN, unless the other is negative infinity."""
    return -go_max(-left, -right)


def int32(value: float) -> int:
    """Truncate towards zero. NaN and values out of range become the least int32."""
    return int(value) if INT32_MIN - 1 < value < _INT32_END else INT32_MIN


def to_nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, as Go's times and durations are, so that sums of decimal fractions compare exactly."""
    return round(seconds * NANOSECONDS)


def go_power(base: float, exponent: int) -> float:
    """Square and multiply from the exponent's lowest bit on, as Go does, so that the last digit is the same."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def round_to_micro(value: float) -> float:
    """Round to six decimal places, halves away from zero."""
    scaled = value * _MICRO
    if not isfinite(scaled):
        return scaled
    whole = trunc(scaled)
    if abs(scaled - whole) >= 0.5:
        whole += 1 if scaled > 0 else -1
    return whole / _MICRO
