"""Averages over the last seconds, as Knative computes them: a linear window and an exponentially weighted one.

Follows knative/serving, `pkg/autoscaler/aggregation/bucketing.go`. Values of one bucket add up: several reporters of
the same second are summed. Times are seconds of one clock, from zero upwards, given by the caller.
"""

from collections.abc import Mapping
from math import ceil, exp, floor, log
from typing import Final, Literal

from controlplane.scaling.policy.go_numbers import NANOSECONDS, go_divide, go_power, round_to_micro, to_nanoseconds

BUCKET_S: Final = 1
AverageKind = Literal["linear", "weighted"]  # the kind of window that decides a version's scale
MIN_SMOOTHING: Final = 0.2  # the slowest decay of a weighted window
OMITTED_WEIGHT: Final = 0.0001  # the weights of a whole window add up to 1 less this much
_ZERO_TIME_NS: Final = 62_135_596_800 * NANOSECONDS  # from Go's zero time, where its buckets begin, to the epoch
# By number of buckets: here the last digit of Go's exponential (amd64) differs from C's.
_SMOOTHING: Final = {
    24: 0.31870793094203875,
    25: 0.3081690290810636,
    31: 0.25703604924050527,
    34: 0.23730141409765548,
    35: 0.231375389960226,
}


class LinearWindow:
    """Sums per bucket. The average divides only by buckets that can hold data, so a young window is not diluted.

    A bucket begins at a multiple of its length since Go's zero time. Its index counts whole seconds of its length since
    the epoch. For lengths where the two disagree, values and silence are counted in surprising ways, as in Knative.
    """

    def __init__(self, window_s: float, bucket_s: float = BUCKET_S) -> None:
        if not (window_s > 0 and bucket_s >= 1):
            raise ValueError(
                f"window of {window_s:g} s in buckets of {bucket_s:g} s: it must be positive, and they 1 or more"
            )
        self._window_ns = to_nanoseconds(window_s)
        self._bucket_ns = to_nanoseconds(bucket_s)
        self._phase_ns = _ZERO_TIME_NS % self._bucket_ns
        self._stride_ns = floor(bucket_s) * NANOSECONDS  # length of a bucket by which its number is computed
        self._buckets = [0.0] * self._count(self._window_ns)
        self._total = 0.0  # of all buckets
        self._first: int | None = None  # beginning of the bucket of the first write that counts, in nanoseconds
        self._last: int | None = None  # of the latest write

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._window_ns / NANOSECONDS:g} s total={self._total:g}>"

    def record(self, at_s: float, value: float) -> None:
        """Add `value` to the bucket of `at_s`, which may lie in the past. A value from before the window is dropped.

        After a whole silent window the data starts over: the next average covers only values from now on.
        """
        at = to_nanoseconds(at_s)
        begin, number, size = self._begin(at), self._number(at), len(self._buckets)
        if self._last is None:
            self._restart(begin)
        elif begin != self._last:
            if self._last - begin >= self._window_ns:
                return
            if self._first is None or begin < self._first:
                self._first = begin
            if begin > self._last:
                if begin - self._last >= self._window_ns:
                    self._restart(begin)
                else:
                    for skipped in range(self._number(self._last) + 1, number + 1):
                        self._total -= self._buckets[skipped % size]
                        self._buckets[skipped % size] = 0.0
                self._last = begin
        self._buckets[number % size] += value
        self._total += value

    def average(self, now_s: float) -> float:
        """Return the average per bucket, rounded to 6 decimal places; 0 after a silent window.

        A `now_s` before the last write counts as the last write. Buckets after the last write are in neither the sum
        nor the divisor: missing data is not zero data.
        """
        if self._last is None:
            return 0.0
        now, size, total = self._begin(to_nanoseconds(now_s)), len(self._buckets), self._total
        written = size if self._first is None else (self._last - self._first) // self._bucket_ns + 1
        if now <= self._last:
            return round_to_micro(total / min(written, size))
        if now - self._last >= self._window_ns:
            return 0.0
        newest, latest = self._number(self._last), self._number(now)
        for overwritten in range(newest + 1, latest + 1):
            total -= self._buckets[overwritten % size]
        return round_to_micro(go_divide(total, min(written, size - (latest - newest))))

    def is_empty(self, now_s: float) -> bool:
        """Return whether nothing was written for longer than the window."""
        return self._last is None or self._begin(to_nanoseconds(now_s)) - self._last > self._window_ns

    def resize(self, window_s: float, now_s: float) -> None:
        """Keep the newest buckets that fit. If the window was empty, forget when its data began."""
        window_ns = to_nanoseconds(window_s)
        if window_ns == self._window_ns:
            return
        old, total = self._buckets, 0.0
        fresh = [0.0] * self._count(window_ns)
        if self._last is not None and not self.is_empty(now_s):
            newest = self._number(self._last)
            for number in range(newest, newest - min(len(old), len(fresh)), -1):
                fresh[number % len(fresh)] = old[number % len(old)]
                total += old[number % len(old)]
            # As in Knative: the data counts as if it filled the whole old window.
            self._first = self._last - (len(old) - 1) * self._bucket_ns
        else:
            self._first = None
        self._window_ns, self._buckets, self._total = window_ns, fresh, total

    def check_integrity(self) -> None:
        """Assert that the total is the sum of the buckets, up to rounding of floats."""
        assert abs(self._total - sum(self._buckets)) <= 1e-6 * max(1.0, *(abs(value) for value in self._buckets))
        assert (self._first is None) or (self._last is not None and self._first <= self._last)

    def _restart(self, begin: int) -> None:
        self._buckets = [0.0] * len(self._buckets)
        self._total = 0.0
        self._first = self._last = begin

    def _begin(self, at_ns: int) -> int:
        """Return the beginning of the bucket of `at_ns`."""
        return at_ns - (at_ns + self._phase_ns) % self._bucket_ns

    def _number(self, at_ns: int) -> int:
        """Return the bucket's number, rounded towards zero: a first bucket that began before the epoch has number 0."""
        return at_ns // self._stride_ns if at_ns >= 0 else -(-at_ns // self._stride_ns)

    def _count(self, window_ns: int) -> int:
        """Return the number of buckets of a window. A partial one counts as a whole one."""
        return ceil(window_ns / self._bucket_ns)


class WeightedWindow(LinearWindow):
    """Newer buckets weigh more: c, c(1-c), c(1-c)², ... Averages are not rounded, nor scaled up in young windows."""

    def average(self, now_s: float) -> float:
        """Return the weighted sum of the buckets up to `now_s`; 0 if the window is empty."""
        if self._last is None or self.is_empty(now_s):
            return 0.0
        smoothing, size = smoothing_coefficient(len(self._buckets)), len(self._buckets)
        silent = max(0, self._begin(to_nanoseconds(now_s)) - self._last) // self._bucket_ns
        weight = smoothing * go_power(1 - smoothing, silent)
        newest, result = self._number(self._last), 0.0
        for age in range(size - silent):
            result += self._buckets[(newest - age) % size] * weight
            weight *= 1 - smoothing
        return result


WINDOW_TYPES: Final[Mapping[AverageKind, type[LinearWindow]]] = {"linear": LinearWindow, "weighted": WeightedWindow}


def convert_window(average: AverageKind, window: LinearWindow) -> LinearWindow:
    """Return the window, or a window of the other kind with the same data. Both kinds store the same fields."""
    kind = WINDOW_TYPES[average]
    if type(window) is kind:
        return window
    other = kind(BUCKET_S)
    vars(other).update(vars(window))
    return other


def smoothing_coefficient(buckets: int) -> float:
    """Return c such that a window of so many buckets holds all weight but OMITTED_WEIGHT; at least MIN_SMOOTHING."""
    return _SMOOTHING.get(buckets) or max(1 - exp(1 / buckets * log(OMITTED_WEIGHT)), MIN_SMOOTHING)


def panic_window_s(stable_window_s: float, percentage: float) -> int:
    """Return the length of the panic window in whole seconds, halves rounded up; at least one bucket."""
    return max(BUCKET_S, floor(stable_window_s * percentage / 100 + 0.5))
