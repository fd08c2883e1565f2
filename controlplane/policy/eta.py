"""How long a start would take: from its bytes by tier, the tiers' measured rates, and how its steps went before.

A start is a process and bytes side by side, then the lease's own part, the bind, and (for a caller) the first batch.
Each step is learned per version, else from versions of about its size, else a figure that is stated here. Pure but for
the state of `History`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from contracts.timeline import Span, Stage
from contracts.wire import Wire

K = TypeVar("K", bound=Hashable)

WEIGHT: Final = 0.3  # of the newest start
MAX_VERSIONS: Final = 4096  # that are remembered; the one that started longest ago is forgotten first
KEPT_ERRORS: Final = 16  # per version
LEAST_S: Final = 1e-4  # a ratio has a denominator


class Known(StrEnum):
    """Whence the steps of an estimate."""

    VERSION = "version"  # its own starts
    SIZE = "size"  # starts of versions of about its size
    GUESS = "guess"  # nothing has started yet


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of what a start does beside its bytes."""

    lease_s: float  # a lease, beyond what its bytes take
    bind_s: float  # from the last byte to ready: what was not done beside the bytes
    answer_s: float  # from ready to the first token: dispatch, known answers and prefill


GUESS: Final = Steps(0.01, 0.1, 0.1)
PARKED_S: Final = 0.005
FORKED_S: Final = 0.3  # where a standby has to be born first


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one start, in seconds."""

    process_s: float
    bytes_s: float
    steps: Steps
    known: Known

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
        return self.actual_s / max(self.predicted_s, LEAST_S)


@dataclass(frozen=True, slots=True)
class Mean:
    """Exponentially weighted; the first value is taken as it is. Without a `count` it is a guess."""

    value: float
    count: int = 0

    def with_one(self, value: float) -> "Mean":
        """With one more."""
        weight = WEIGHT if self.count else 1.0
        return Mean(weight * value + (1 - weight) * self.value, self.count + 1)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What is known of one version, or of one size.

    `fetch` is what a lease took, its bytes included, in starts and in wakes without weights alike; `start` and `refill`
    are those two without it, `wake` is whole. So the two are compared over the same bytes, wherever those came from.
    """

    lease: Mean = Mean(GUESS.lease_s)
    bind: Mean = Mean(GUESS.bind_s)  # of bytes that were in memory
    tail: Mean = Mean(GUESS.bind_s)  # of bytes that came, beside which most of it is done
    answer: Mean = Mean(GUESS.answer_s)
    fetch: Mean = Mean(GUESS.lease_s)
    start: Mean = Mean(PARKED_S + GUESS.bind_s)
    wake: Mean = Mean(0.05)
    refill: Mean = Mean(GUESS.bind_s)


@dataclass(frozen=True, slots=True)
class _Version:
    steps: _Steps
    size: int
    misses: tuple[PastForecast, ...] = ()
    fetches: tuple[tuple[str, Mean], ...] = ()  # by the slowest tier that bytes came from


@dataclass(frozen=True, slots=True)
class Restore:
    """Mean seconds from asking for a replica until it is ready, and how many times that was seen (0: a guess)."""

    seconds: float
    seen: int


class History(Generic[K]):
    """Of all versions, by any key of theirs. Bounded; begins anew with its process."""

    def __init__(self) -> None:
        self._versions: OrderedDict[K, _Version] = OrderedDict()
        self._sizes: dict[int, _Steps] = {}
        self._parked = Mean(PARKED_S)
        self._forked = Mean(FORKED_S)

    def __repr__(self) -> str:
        return f"<History versions={len(self._versions)} sizes={sorted(self._sizes)}>"

    def estimate(self, key: K, total_bytes: int, bytes_s: float, *, parked: bool) -> Estimate:
        """Of a start now: its bytes would take `bytes_s`; whether a standby is `parked` for it."""
        process = self._parked if parked else self._forked
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        found = version.steps if version is not None and version.steps.start.count else size or _Steps()
        known = Known.VERSION if version is not None and found is version.steps else Known.SIZE if size else Known.GUESS
        bind, tail = (self._mean(key, total_bytes, which) for which in ("bind", "tail"))
        bind_s = tail.value if bytes_s and tail.count else bind.value
        steps = Steps(found.lease.value, bind_s, found.answer.value)
        return Estimate(process.value, bytes_s, steps, known)

    def started(
        self, key: K, total_bytes: int, spans: tuple[Span, ...], *, parked: bool, bytes_s: float | None, tier: str
    ) -> None:
        """A start went well. `bytes_s` is what its bytes were expected to take; None where nobody had asked. `tier` is
        the slowest that it had bytes from.
        """
        if (found := _stages(spans)) is None:
            return
        promoted_s, fetch_s, bind_s = found
        if parked:
            self._parked = self._parked.with_one(promoted_s)
        else:
            self._forked = self._forked.with_one(promoted_s)

        def learn(steps: _Steps) -> _Steps:
            # Only of leases that moved no bytes: the error of bytes that did is the tiers' to learn.
            lease = steps.lease.with_one(fetch_s) if bytes_s == 0.0 else steps.lease
            bind = steps.bind.with_one(bind_s) if bytes_s == 0.0 else steps.bind
            tail = steps.tail.with_one(bind_s) if bytes_s else steps.tail
            fetch, start = steps.fetch.with_one(fetch_s), steps.start.with_one(promoted_s + bind_s)
            return replace(steps, lease=lease, bind=bind, tail=tail, fetch=fetch, start=start)

        self._update(key, total_bytes, learn)
        self._fetched(key, tier, fetch_s)

    def woke(self, key: K, total_bytes: int, seconds: float) -> None:
        """A sleeping replica was ready after so long."""
        self._update(key, total_bytes, lambda steps: replace(steps, wake=steps.wake.with_one(seconds)))

    def refilled(self, key: K, total_bytes: int, spans: tuple[Span, ...], tier: str) -> None:
        """A replica that slept without weights has them again, from `tier` and quicker ones."""
        if (found := _stages(spans)) is None:
            return
        promoted_s, fetch_s, bind_s = found

        def learn(steps: _Steps) -> _Steps:
            return replace(
                steps, fetch=steps.fetch.with_one(fetch_s), refill=steps.refill.with_one(promoted_s + bind_s)
            )

        self._update(key, total_bytes, learn)
        self._fetched(key, tier, fetch_s)

    def answered(self, key: K, seconds: float) -> None:
        """Of a start: from ready to its caller's first token. Of versions that started here only."""
        if (version := self._versions.get(key)) is not None:
            self._update(
                key, version.size, lambda steps: replace(steps, answer=steps.answer.with_one(max(0.0, seconds)))
            )

    def missed(self, key: K, miss: PastForecast) -> None:
        """How right what was said of a start was."""
        if (version := self._versions.get(key)) is not None:
            self._versions[key] = replace(version, misses=(*version.misses, miss)[-KEPT_ERRORS:])

    def misses(self, key: K) -> tuple[PastForecast, ...]:
        """The last ones of the version, the oldest first."""
        version = self._versions.get(key)
        return () if version is None else version.misses

    def start(self, key: K, total_bytes: int) -> Restore:
        """From zero to ready, by its own starts, else by those of its size."""
        own = self._mean(key, total_bytes, "start")
        return Restore(own.value + self._mean(key, total_bytes, "fetch").value, own.count)

    def wake(self, key: K, total_bytes: int) -> Restore:
        """From asleep to ready, by its own wakes, else by those of its size. Before one was seen: no longer than from
        asleep without weights, as it does less.
        """
        mean = self._mean(key, total_bytes, "wake")
        seconds = mean.value if mean.count else min(mean.value, self.refill(key, total_bytes).seconds)
        return Restore(seconds, mean.count)

    def refill(self, key: K, total_bytes: int) -> Restore:
        """From asleep without weights to ready, by its own wakes, else by those of its size. Before one was seen: a
        start's time without its process.
        """
        own = self._mean(key, total_bytes, "refill")
        start = self._mean(key, total_bytes, "start")
        own_s = own.value if own.count or not start.count else max(0.0, start.value - self._parked.value)
        return Restore(own_s + self._mean(key, total_bytes, "fetch").value, own.count)

    def fetches(self, key: K) -> dict[str, Restore]:
        """What the version's own leases took, by the slowest tier that bytes came from."""
        version = self._versions.get(key)
        return {tier: Restore(mean.value, mean.count) for tier, mean in (version.fetches if version else ())}

    def _fetched(self, key: K, tier: str, seconds: float) -> None:
        version = self._versions[key]
        found = dict(version.fetches)
        found[tier] = found.get(tier, Mean(0.0)).with_one(seconds)
        self._versions[key] = replace(version, fetches=tuple(found.items()))

    def _mean(self, key: K, total_bytes: int, which: str) -> Mean:
        """The version's own where it has one, else its size's, else the guess."""
        version, size = self._versions.get(key), self._sizes.get(size_class(total_bytes))
        means: list[Mean] = [getattr(steps, which) for steps in (version and version.steps, size) if steps]
        return next((each for each in means if each.count), getattr(_Steps(), which))

    def _update(self, key: K, total_bytes: int, learn: Callable[[_Steps], _Steps]) -> None:
        size = size_class(total_bytes)
        version = self._versions.pop(key, None) or _Version(_Steps(), size)
        self._versions[key] = replace(version, steps=learn(version.steps))
        while len(self._versions) > MAX_VERSIONS:
            self._versions.popitem(last=False)
        self._sizes[size] = learn(self._sizes.get(size, _Steps()))


def _stages(spans: tuple[Span, ...]) -> tuple[float, float, float] | None:
    """Seconds until promoted, then until leased, then until ready; None where one is missing."""
    after_s = {span.stage: span.after_us / 1e6 for span in spans}
    if not {Stage.PROMOTED, Stage.LEASED, Stage.READY} <= after_s.keys():
        return None
    promoted_s, leased_s, ready_s = after_s[Stage.PROMOTED], after_s[Stage.LEASED], after_s[Stage.READY]
    return promoted_s, leased_s - promoted_s, ready_s - leased_s


def size_class(total_bytes: int) -> int:
    """Versions within a factor of two of one another."""
    return max(0, total_bytes).bit_length()
