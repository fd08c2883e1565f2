"""Estimate how long a start takes: from its bytes by tier, the tiers' measured rates, and past starts.

A start forks a process while it fetches bytes. Then come the rest of the lease, the bind, and (for a caller) the first
batch. Each step is learned per version, otherwise from versions of about the same size, otherwise from a constant in
this module. Pure but for the state of `RestoreHistory`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import Wire

K = TypeVar("K", bound=Hashable)

NEWEST_WEIGHT: Final = 0.3  # of the newest start
MAX_VERSIONS: Final = 4096  # remembered versions; the least recently updated is forgotten first
MAX_FORECAST_ERRORS: Final = 16  # per version
MIN_PREDICTED_S: Final = 1e-4  # keeps the denominator of a ratio above zero


class EstimateBasis(StrEnum):
    """Where the steps of an estimate come from."""

    VERSION = "version"  # the version's own starts
    SIZE = "size"  # starts of versions of about its size
    GUESS = "guess"  # constants: nothing has started yet


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of the steps of a start, without its process and bytes."""

    lease_s: float  # the lease, without the time for its bytes
    bind_s: float  # from the last byte to ready, without the part that overlaps with the bytes
    answer_s: float  # from ready to the first token: dispatch, known answers and prefill


GUESS: Final = StageTimes(0.01, 0.1, 0.1)
PARKED_S: Final = 0.005
FORKED_S: Final = 0.3  # if a standby must be forked first


@dataclass(frozen=True, slots=True)
class RestoreEstimate:
    """Estimate of one start, in seconds."""

    process_s: float
    bytes_s: float
    steps: StageTimes
    basis: EstimateBasis

    @property
    def ready_s(self) -> float:
        """Return the seconds until the replica takes requests."""
        return max(self.process_s, self.bytes_s) + self.steps.lease_s + self.steps.bind_s

    @property
    def first_token_s(self) -> float:
        """Return the seconds until the first caller has a token."""
        return self.ready_s + self.steps.answer_s


class PastForecast(Wire, frozen=True):
    """Prediction and duration of a finished start, with the slowest tier of its bytes."""

    predicted_s: float
    actual_s: float
    tier: str

    @property
    def ratio(self) -> float:
        """Return actual over predicted time: 1 is right, 2 means that it took twice as long."""
        return self.actual_s / max(self.predicted_s, MIN_PREDICTED_S)


@dataclass(frozen=True, slots=True)
class RunningMean:
    """Exponentially weighted mean. The first sample replaces the initial value, which is a guess."""

    value: float
    count: int = 0

    def with_sample(self, value: float) -> "RunningMean":
        """Return the mean with one more sample."""
        weight = NEWEST_WEIGHT if self.count else 1.0
        return RunningMean(weight * value + (1 - weight) * self.value, self.count + 1)


@dataclass(frozen=True, slots=True)
class _StageMeans:
    """Means of one version, or of one size class.

    `fetch` is a lease with its bytes, both in starts and in wakes without weights. `start` and `refill` are these two
    without the lease; `wake` is a whole wake. So the two are compared over the same bytes, whichever tier had them.
    """

    lease: RunningMean = RunningMean(GUESS.lease_s)
    bind: RunningMean = RunningMean(GUESS.bind_s)  # of bytes that were in memory
    tail: RunningMean = RunningMean(GUESS.bind_s)  # of fetched bytes: most of the bind overlaps with the fetch
    answer: RunningMean = RunningMean(GUESS.answer_s)
    fetch: RunningMean = RunningMean(GUESS.lease_s)
    start: RunningMean = RunningMean(PARKED_S + GUESS.bind_s)
    wake: RunningMean = RunningMean(0.05)
    refill: RunningMean = RunningMean(GUESS.bind_s)


@dataclass(frozen=True, slots=True)
class _Version:
    steps: _StageMeans
    size: int
    forecast_errors: tuple[PastForecast, ...] = ()
    fetches: tuple[tuple[str, RunningMean], ...] = ()  # by the slowest tier that bytes came from


@dataclass(frozen=True, slots=True)
class RestoreTime:
    """Mean seconds from requesting a replica until it is ready, and the number of samples (0: a guess)."""

    seconds: float
    samples: int


class RestoreHistory(Generic[K]):
    """Durations of past starts and wakes, by version. Bounded. Kept in memory, so it is empty after a restart."""

    def __init__(self) -> None:
        self._versions: OrderedDict[K, _Version] = OrderedDict()
        self._sizes: dict[int, _StageMeans] = {}
        self._parked = RunningMean(PARKED_S)
        self._forked = RunningMean(FORKED_S)

    def __repr__(self) -> str:
        return f"<RestoreHistory versions={len(self._versions)} sizes={sorted(self._sizes)}>"

    def estimate(self, key: K, total_bytes: int, bytes_s: float, *, parked: bool) -> RestoreEstimate:
        """Estimate a start that begins now. Its bytes take `bytes_s`; `parked`: whether a standby is parked for it."""
        process = self._parked if parked else self._forked
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        found = version.steps if version is not None and version.steps.start.count else size or _StageMeans()
        basis = (
            EstimateBasis.VERSION
            if version is not None and found is version.steps
            else EstimateBasis.SIZE
            if size
            else EstimateBasis.GUESS
        )
        bind, tail = (self._mean(key, total_bytes, mean_name) for mean_name in ("bind", "tail"))
        bind_s = tail.value if bytes_s and tail.count else bind.value
        steps = StageTimes(found.lease.value, bind_s, found.answer.value)
        return RestoreEstimate(process.value, bytes_s, steps, basis)

    def record_start(
        self, key: K, total_bytes: int, spans: tuple[StageSpan, ...], *, parked: bool, bytes_s: float | None, tier: str
    ) -> None:
        """Record a successful start. `bytes_s` is the predicted time of its bytes, None without a prediction. `tier` is
        the slowest tier that it had bytes from.
        """
        if (found := _stages(spans)) is None:
            return
        promoted_s, fetch_s, bind_s = found
        if parked:
            self._parked = self._parked.with_sample(promoted_s)
        else:
            self._forked = self._forked.with_sample(promoted_s)

        def with_new_samples(steps: _StageMeans) -> _StageMeans:
            # Learn the lease only from starts that moved no bytes. If bytes moved, the tiers' rates absorb the error.
            lease = steps.lease.with_sample(fetch_s) if bytes_s == 0.0 else steps.lease
            bind = steps.bind.with_sample(bind_s) if bytes_s == 0.0 else steps.bind
            tail = steps.tail.with_sample(bind_s) if bytes_s else steps.tail
            fetch, start = steps.fetch.with_sample(fetch_s), steps.start.with_sample(promoted_s + bind_s)
            return replace(steps, lease=lease, bind=bind, tail=tail, fetch=fetch, start=start)

        self._update(key, total_bytes, with_new_samples)
        self._record_lease_time(key, tier, fetch_s)

    def record_wake(self, key: K, total_bytes: int, seconds: float) -> None:
        """Record how long a sleeping replica took until it was ready."""
        self._update(key, total_bytes, lambda steps: replace(steps, wake=steps.wake.with_sample(seconds)))

    def record_deep_wake(self, key: K, total_bytes: int, spans: tuple[StageSpan, ...], tier: str) -> None:
        """Record that a replica that slept without weights has them again. `tier` is the slowest that it read from."""
        if (found := _stages(spans)) is None:
            return
        promoted_s, fetch_s, bind_s = found

        def with_new_samples(steps: _StageMeans) -> _StageMeans:
            return replace(
                steps, fetch=steps.fetch.with_sample(fetch_s), refill=steps.refill.with_sample(promoted_s + bind_s)
            )

        self._update(key, total_bytes, with_new_samples)
        self._record_lease_time(key, tier, fetch_s)

    def record_answers(self, key: K, seconds: float) -> None:
        """Record the seconds from ready to a caller's first token. Ignored for versions that never started here."""
        if (version := self._versions.get(key)) is not None:
            self._update(
                key, version.size, lambda steps: replace(steps, answer=steps.answer.with_sample(max(0.0, seconds)))
            )

    def record_forecast_error(self, key: K, miss: PastForecast) -> None:
        """Record how accurate the forecast of a finished start was. Ignored for versions that never started here."""
        if (version := self._versions.get(key)) is not None:
            self._versions[key] = replace(
                version, forecast_errors=(*version.forecast_errors, miss)[-MAX_FORECAST_ERRORS:]
            )

    def forecast_errors(self, key: K) -> tuple[PastForecast, ...]:
        """Return the version's last finished forecasts, the oldest first."""
        version = self._versions.get(key)
        return () if version is None else version.forecast_errors

    def start_time(self, key: K, total_bytes: int) -> RestoreTime:
        """Return the time from zero to ready, from the version's own starts, otherwise from those of its size."""
        own = self._mean(key, total_bytes, "start")
        return RestoreTime(own.value + self._mean(key, total_bytes, "fetch").value, own.count)

    def wake_time(self, key: K, total_bytes: int) -> RestoreTime:
        """Return the time from asleep to ready, from the version's own wakes, otherwise from those of its size. Without
        a sample it is at most the time of a refill, because a wake does less.
        """
        mean = self._mean(key, total_bytes, "wake")
        seconds = mean.value if mean.count else min(mean.value, self.refill_time(key, total_bytes).seconds)
        return RestoreTime(seconds, mean.count)

    def refill_time(self, key: K, total_bytes: int) -> RestoreTime:
        """Return the time from asleep without weights to ready, from own wakes, otherwise from those of its size.
        Without a sample it is the time of a start without its process.
        """
        own = self._mean(key, total_bytes, "refill")
        start = self._mean(key, total_bytes, "start")
        own_s = own.value if own.count or not start.count else max(0.0, start.value - self._parked.value)
        return RestoreTime(own_s + self._mean(key, total_bytes, "fetch").value, own.count)

    def fetch_times(self, key: K) -> dict[str, RestoreTime]:
        """Return how long the version's own leases took, by the slowest tier that bytes came from."""
        version = self._versions.get(key)
        return {tier: RestoreTime(mean.value, mean.count) for tier, mean in (version.fetches if version else ())}

    def _record_lease_time(self, key: K, tier: str, seconds: float) -> None:
        version = self._versions[key]
        found = dict(version.fetches)
        found[tier] = found.get(tier, RunningMean(0.0)).with_sample(seconds)
        self._versions[key] = replace(version, fetches=tuple(found.items()))

    def _mean(self, key: K, total_bytes: int, mean_name: str) -> RunningMean:
        """Return the version's own mean if it has samples, otherwise that of its size class, otherwise the guess."""
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        means: list[RunningMean] = [getattr(steps, mean_name) for steps in (version and version.steps, size) if steps]
        return next((each for each in means if each.count), getattr(_StageMeans(), mean_name))

    def _update(self, key: K, total_bytes: int, with_new_samples: Callable[[_StageMeans], _StageMeans]) -> None:
        size = size_class(total_bytes)
        version = self._versions.pop(key, None) or _Version(_StageMeans(), size)
        self._versions[key] = replace(version, steps=with_new_samples(version.steps))
        while len(self._versions) > MAX_VERSIONS:
            self._versions.popitem(last=False)
        self._sizes[size] = with_new_samples(self._sizes.get(size, _StageMeans()))


def _stages(spans: tuple[StageSpan, ...]) -> tuple[float, float, float] | None:
    """Return the seconds until promoted, from there to leased, and on to ready; None if a span is missing."""
    after_s = {span.stage: span.after_us / 1e6 for span in spans}
    if not {Stage.PROMOTED, Stage.LEASED, Stage.READY} <= after_s.keys():
        return None
    promoted_s, leased_s, ready_s = after_s[Stage.PROMOTED], after_s[Stage.LEASED], after_s[Stage.READY]
    return promoted_s, leased_s - promoted_s, ready_s - leased_s


def size_class(total_bytes: int) -> int:
    """Return the class of versions whose sizes are within a factor of two of one another."""
    return max(0, total_bytes).bit_length()
