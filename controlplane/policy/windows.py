"""Averages over the last seconds, as Knative computes them: a linear window and an exponentially weighted one.

Facts from knative/serving, pkg/autoscaler/aggregation/bucketing.go. Buckets add: reporters of one second sum up.
Times are seconds of one clock that is the same for all calls, from zero upwards; the caller says what time it is.
"""

from math import ceil, copysign, floor, trunc
from typing import Final, Protocol

BUCKET_S: Final = 1
MIN_SMOOTHING: Final = 0.2  # the slowest decay of a weighted window
WEIGHT_PRECISION: Final = 0.9999  # the weights of a whole window sum up to this much
_DIGITS: Final = 10**6


class Window(Protocol):
    """What both kinds offer."""

    def record(self, at_s: float, value: float) -> None: ...
    def average(self, now_s: float) -> float: ...
    def is_empty(self, now_s: float) -> bool: ...
    def resize(self, window_s: float, now_s: float) -> None: ...


class LinearWindow:
    """Sums per bucket; the average divides by the buckets that can hold something, so a young window is not diluted."""

    def __init__(self, window_s: float, bucket_s: int = BUCKET_S) -> None:
        if window_s <= 0 or bucket_s < 1:
            raise ValueError(f"window of {window_s:g} s in buckets of {bucket_s} s: both must be positive")
        self._window_s = window_s
        self._bucket_s = bucket_s
        self._buckets = [0.0] * ceil(window_s / bucket_s)
        self._total = 0.0  # of all buckets
        self._first: int | None = None  # number of the bucket of the first write that counts
        self._last: int | None = None  # of the latest write

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._window_s:g} s total={self._total:g}>"

    def record(self, at_s: float, value: float) -> None:
        """Add `value` to the bucket of `at_s`. One from before the window is dropped, a later one of the past is added.

        After a whole silent window everything begins anew: the next average is over what comes from now on.
        """
        bucket = floor(at_s / self._bucket_s)
        if self._last is None:
            self._restart(bucket)
        elif bucket != self._last:
            if self._seconds(self._last - bucket) >= self._window_s:
                return
            if self._first is None or bucket < self._first:
                self._first = bucket
            if bucket > self._last:
                if self._seconds(bucket - self._last) >= self._window_s:
                    self._restart(bucket)
                else:
                    for skipped in range(self._last + 1, bucket + 1):
                        self._total -= self._buckets[skipped % len(self._buckets)]
                        self._buckets[skipped % len(self._buckets)] = 0.0
                self._last = bucket
        self._buckets[bucket % len(self._buckets)] += value
        self._total += value

    def average(self, now_s: float) -> float:
        """Per bucket, rounded to 6 digits; 0 after a silent window.

        A `now_s` that lags behind the last write counts as that. If the last write was some buckets ago, those are
        in neither the sum nor the divisor: missing data is not zero data.
        """
        if self._last is None or self._first is None:
            return 0.0
        now, size = floor(now_s / self._bucket_s), len(self._buckets)
        silent = max(0, now - self._last)
        if silent and self._seconds(silent) >= self._window_s:
            return 0.0
        total = self._total
        for overwritten in range(self._last + 1, self._last + silent + 1):
            total -= self._buckets[overwritten % size]
        return _round_half_away(total / min(self._last - self._first + 1, size - silent))

    def is_empty(self, now_s: float) -> bool:
        """Whether nothing was written for longer than the window."""
        return self._last is None or self._seconds(floor(now_s / self._bucket_s) - self._last) > self._window_s

    def resize(self, window_s: float, now_s: float) -> None:
        """Keep the newest buckets that fit. A window that was empty forgets when its data began."""
        if window_s == self._window_s:
            return
        old, last = self._buckets, self._last
        fresh = [0.0] * ceil(window_s / self._bucket_s)
        if last is not None and not self.is_empty(now_s):
            for bucket in range(last, last - min(len(old), len(fresh)), -1):
                fresh[bucket % len(fresh)] = old[bucket % len(old)]
            # As the source has it: the data counts as going back for the whole of the old window.
            self._first = last - (len(old) - 1)
        else:
            self._first = None
        self._window_s, self._buckets, self._total = window_s, fresh, sum(fresh)

    def check_integrity(self) -> None:
        """The total is that of the buckets, up to rounding of floats."""
        assert abs(self._total - sum(self._buckets)) <= 1e-6 * max(1.0, *(abs(value) for value in self._buckets))
        assert (self._first is None) or (self._last is not None and self._first <= self._last)

    def _restart(self, bucket: int) -> None:
        self._buckets = [0.0] * len(self._buckets)
        self._total = 0.0
        self._first = self._last = bucket

    def _seconds(self, buckets: int) -> int:
        return buckets * self._bucket_s


class WeightedWindow(LinearWindow):
    """Newer buckets weigh more: c, c(1-c), c(1-c)², ... The average is not rounded and a young window is not lifted."""

    def average(self, now_s: float) -> float:
        """The weighted sum of the buckets up to `now_s`; 0 where the window is empty."""
        if self._last is None or self.is_empty(now_s):
            return 0.0
        smoothing, size = smoothing_coefficient(len(self._buckets)), len(self._buckets)
        silent = max(0, floor(now_s / self._bucket_s) - self._last)
        weight = smoothing * float((1 - smoothing) ** silent)
        result = 0.0
        for age in range(size - silent):
            result += self._buckets[(self._last - age) % size] * weight
            weight *= 1 - smoothing
        return result


def smoothing_coefficient(buckets: int) -> float:
    """c such that a window of so many buckets holds WEIGHT_PRECISION of all weight; never below MIN_SMOOTHING."""
    return max(1 - float((1 - WEIGHT_PRECISION) ** (1 / buckets)), MIN_SMOOTHING)


def panic_window_s(stable_window_s: float, percentage: float) -> int:
    """Whole seconds, halves up; one bucket at least."""
    return max(BUCKET_S, floor(stable_window_s * percentage / 100 + 0.5))


def _round_half_away(value: float) -> float:
    scaled = value * _DIGITS
    whole = trunc(scaled)
    if abs(scaled - whole) >= 0.5:
        whole += int(copysign(1, scaled))
    return whole / _DIGITS
