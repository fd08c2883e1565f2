"""How long a start would take: from its bytes by tier, the tiers' measured rates, and how its steps went before.

A start is a process and bytes side by side, then the lease's own part, the bind, and (for a caller) the first batch.
Each step is learned per version, else from versions of about its size, else a figure that is stated here. Pure but for
the state of `RestoreHistory`.
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
MAX_VERSIONS: Final = 4096  # that are remembered; the one that started longest ago is forgotten first
MAX_FORECAST_ERRORS: Final = 16  # per version
MIN_PREDICTED_S: Final = 1e-4  # a ratio has a denominator


class EstimateBasis(StrEnum):
    """Whence the steps of an estimate."""

    VERSION = "version"  # its own starts
    SIZE = "size"  # starts of versions of about its size
    GUESS = "guess"  # nothing has started yet


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of what a start does beside its bytes."""

    lease_s: float  # a lease, beyond what its bytes take
    bind_s: float  # from the last byte to ready: what was not done beside the bytes
    answer_s: float  # from ready to the first token: dispatch, known answers and prefill


GUESS: Final = StageTimes(0.01, 0.1, 0.1)
PARKED_S: Final = 0.005
FORKED_S: Final = 0.3  # where a standby has to be born first


@dataclass(frozen=True, slots=True)
class RestoreEstimate:
    """Of one start, in seconds."""

    process_s: float
    bytes_s: float
    steps: StageTimes
    known: EstimateBasis

    @property
    def ready_s(self) -> float:
        """Until the replica takes requests."""
        return max(self.process_s, self.bytes_s) + self.steps.lease_s + self.steps.bind_s

    @property
    def first_token_s(self) -> float:
        """Until its first caller has a token."""
        return self.ready_s + self.steps.answer_s


class PastForecast(Wire, frozen=True):
    """Of a start that is over: what was said while it ran, what it took, by the slowest tier of its bytes."""

    predicted_s: float
    actual_s: float
    tier: str

    @property
    def ratio(self) -> float:
        """1 is right, 2 took twice as long as was said."""
        return self.actual_s / max(self.predicted_s, MIN_PREDICTED_S)


@dataclass(frozen=True, slots=True)
class RunningMean:
    """Exponentially weighted; the first value is taken as it is. Without a `count` it is a guess."""

    value: float
    count: int = 0

    def with_sample(self, value: float) -> "RunningMean":
        """With one more."""
        weight = NEWEST_WEIGHT if self.count else 1.0
        return RunningMean(weight * value + (1 - weight) * self.value, self.count + 1)


@dataclass(frozen=True, slots=True)
class _StageMeans:
    """What is known of one version, or of one size.

    `fetch` is what a lease took, its bytes included, in starts and in wakes without weights alike; `start` and `refill`
    are those two without it, `wake` is whole. So the two are compared over the same bytes, wherever those came from.
    """

    lease: RunningMean = RunningMean(GUESS.lease_s)
    bind: RunningMean = RunningMean(GUESS.bind_s)  # of bytes that were in memory
    tail: RunningMean = RunningMean(GUESS.bind_s)  # of bytes that came, beside which most of it is done
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
    """Mean seconds from asking for a replica until it is ready, and how many times that was seen (0: a guess)."""

    seconds: float
    seen: int


class RestoreHistory(Generic[K]):
    """Of all versions, by any key of theirs. Bounded; begins anew with its process."""

    def __init__(self) -> None:
        self._versions: OrderedDict[K, _Version] = OrderedDict()
        self._sizes: dict[int, _StageMeans] = {}
        self._parked = RunningMean(PARKED_S)
        self._forked = RunningMean(FORKED_S)

    def __repr__(self) -> str:
        return f"<RestoreHistory versions={len(self._versions)} sizes={sorted(self._sizes)}>"

    def estimate(self, key: K, total_bytes: int, bytes_s: float, *, parked: bool) -> RestoreEstimate:
        """Of a start now: its bytes would take `bytes_s`; whether a standby is `parked` for it."""
        process = self._parked if parked else self._forked
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        found = version.steps if version is not None and version.steps.start.count else size or _StageMeans()
        known = (
            EstimateBasis.VERSION
            if version is not None and found is version.steps
            else EstimateBasis.SIZE
            if size
            else EstimateBasis.GUESS
        )
        bind, tail = (self._mean(key, total_bytes, which) for which in ("bind", "tail"))
        bind_s = tail.value if bytes_s and tail.count else bind.value
        steps = StageTimes(found.lease.value, bind_s, found.answer.value)
        return RestoreEstimate(process.value, bytes_s, steps, known)

    def record_start(
        self, key: K, total_bytes: int, spans: tuple[StageSpan, ...], *, parked: bool, bytes_s: float | None, tier: str
    ) -> None:
        """A start went well. `bytes_s` is what its bytes were expected to take; None where nobody had asked. `tier` is
        the slowest that it had bytes from.
        """
        if (found := _stages(spans)) is None:
            return
        promoted_s, fetch_s, bind_s = found
        if parked:
            self._parked = self._parked.with_sample(promoted_s)
        else:
            self._forked = self._forked.with_sample(promoted_s)

        def with_new_samples(steps: _StageMeans) -> _StageMeans:
            # Only of leases that moved no bytes: the error of bytes that did is the tiers' to learn.
            lease = steps.lease.with_sample(fetch_s) if bytes_s == 0.0 else steps.lease
            bind = steps.bind.with_sample(bind_s) if bytes_s == 0.0 else steps.bind
            tail = steps.tail.with_sample(bind_s) if bytes_s else steps.tail
            fetch, start = steps.fetch.with_sample(fetch_s), steps.start.with_sample(promoted_s + bind_s)
            return replace(steps, lease=lease, bind=bind, tail=tail, fetch=fetch, start=start)

        self._update(key, total_bytes, with_new_samples)
        self._record_lease_time(key, tier, fetch_s)

    def record_wake(self, key: K, total_bytes: int, seconds: float) -> None:
        """A sleeping replica was ready after so long."""
        self._update(key, total_bytes, lambda steps: replace(steps, wake=steps.wake.with_sample(seconds)))

    def record_deep_wake(self, key: K, total_bytes: int, spans: tuple[StageSpan, ...], tier: str) -> None:
        """A replica that slept without weights has them again, from `tier` and quicker ones."""
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
        """Of a start: from ready to its caller's first token. Of versions that started here only."""
        if (version := self._versions.get(key)) is not None:
            self._update(
                key, version.size, lambda steps: replace(steps, answer=steps.answer.with_sample(max(0.0, seconds)))
            )

    def record_forecast_error(self, key: K, miss: PastForecast) -> None:
        """How right what was said of a start was."""
        if (version := self._versions.get(key)) is not None:
            self._versions[key] = replace(
                version, forecast_errors=(*version.forecast_errors, miss)[-MAX_FORECAST_ERRORS:]
            )

    def forecast_errors(self, key: K) -> tuple[PastForecast, ...]:
        """The last ones of the version, the oldest first."""
        version = self._versions.get(key)
        return () if version is None else version.forecast_errors

    def start(self, key: K, total_bytes: int) -> RestoreTime:
        """From zero to ready, by its own starts, else by those of its size."""
        own = self._mean(key, total_bytes, "start")
        return RestoreTime(own.value + self._mean(key, total_bytes, "fetch").value, own.count)

    def wake(self, key: K, total_bytes: int) -> RestoreTime:
        """From asleep to ready, by its own wakes, else by those of its size. Before one was seen: no longer than from
        asleep without weights, as it does less.
        """
        mean = self._mean(key, total_bytes, "wake")
        seconds = mean.value if mean.count else min(mean.value, self.refill(key, total_bytes).seconds)
        return RestoreTime(seconds, mean.count)

    def refill(self, key: K, total_bytes: int) -> RestoreTime:
        """From asleep without weights to ready, by its own wakes, else by those of its size. Before one was seen: a
        start's time without its process.
        """
        own = self._mean(key, total_bytes, "refill")
        start = self._mean(key, total_bytes, "start")
        own_s = own.value if own.count or not start.count else max(0.0, start.value - self._parked.value)
        return RestoreTime(own_s + self._mean(key, total_bytes, "fetch").value, own.count)

    def fetches(self, key: K) -> dict[str, RestoreTime]:
        """What the version's own leases took, by the slowest tier that bytes came from."""
        version = self._versions.get(key)
        return {tier: RestoreTime(mean.value, mean.count) for tier, mean in (version.fetches if version else ())}

    def _record_lease_time(self, key: K, tier: str, seconds: float) -> None:
        version = self._versions[key]
        found = dict(version.fetches)
        found[tier] = found.get(tier, RunningMean(0.0)).with_sample(seconds)
        self._versions[key] = replace(version, fetches=tuple(found.items()))

    def _mean(self, key: K, total_bytes: int, which: str) -> RunningMean:
        """The version's own where it has one, else its size's, else the guess."""
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        means: list[RunningMean] = [getattr(steps, which) for steps in (version and version.steps, size) if steps]
        return next((each for each in means if each.count), getattr(_StageMeans(), which))

    def _update(self, key: K, total_bytes: int, with_new_samples: Callable[[_StageMeans], _StageMeans]) -> None:
        size = size_class(total_bytes)
        version = self._versions.pop(key, None) or _Version(_StageMeans(), size)
        self._versions[key] = replace(version, steps=with_new_samples(version.steps))
        while len(self._versions) > MAX_VERSIONS:
            self._versions.popitem(last=False)
        self._sizes[size] = with_new_samples(self._sizes.get(size, _StageMeans()))


def _stages(spans: tuple[StageSpan, ...]) -> tuple[float, float, float] | None:
    """Seconds until promoted, then until leased, then until ready; None where one is missing."""
    after_s = {span.stage: span.after_us / 1e6 for span in spans}
    if not {Stage.PROMOTED, Stage.LEASED, Stage.READY} <= after_s.keys():
        return None
    promoted_s, leased_s, ready_s = after_s[Stage.PROMOTED], after_s[Stage.LEASED], after_s[Stage.READY]
    return promoted_s, leased_s - promoted_s, ready_s - leased_s


def size_class(total_bytes: int) -> int:
    """Versions within a factor of two of one another."""
    return max(0, total_bytes).bit_length()
