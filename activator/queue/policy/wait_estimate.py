"""Estimate when a request without a slot will get one. Pure state; callers decide what to refuse.

For a version at zero, the estimate is the control plane's start forecast. For a serving version, it is the recent rate
at which slots came free, in estimated tokens, because only estimates are known for waiting requests. An unknown wait is
None, and no request is refused because of an unknown wait.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.serving.start_forecast import Forecast, StartRow

MIN_ANSWERS: Final = 8  # answers until the throughput is known
HALVING_ANSWERS: Final = 64  # answers after which the older ones count half
OVERDUE_S: Final = 30.0  # a start that is overdue for so long is unknown


class MeasuredThroughput(NamedTuple):
    """Tokens per second that one slot computed, and actual tokens per estimated token. Both are above 0."""

    tokens_per_s: float
    actual_per_estimated: float


@dataclass(slots=True)
class Throughput:
    """How fast the slots of one version come free. Times are monotonic seconds."""

    running: int = 0
    _at_s: float = 0.0
    _held_s: float = 0.0  # slot-seconds of all slots
    _estimated_tokens: float = 0.0  # estimated tokens of finished requests
    _actual_tokens: float = 0.0  # actual tokens
    _answers: int = 0

    def record_grant(self, now: float) -> None:
        """Record that a slot was granted."""
        self._advance(now)
        self.running += 1

    def record_release(self, now: float, estimated_tokens: int, actual_tokens: int) -> None:
        """Record a free slot: `actual_tokens` is 0 without an answer."""
        self._advance(now)
        self.running -= 1
        if not actual_tokens:
            return
        self._estimated_tokens += estimated_tokens
        self._actual_tokens += actual_tokens
        self._answers += 1
        if self._answers >= HALVING_ANSWERS:
            self._held_s, self._estimated_tokens, self._actual_tokens = (
                self._held_s / 2,
                self._estimated_tokens / 2,
                self._actual_tokens / 2,
            )
            self._answers //= 2

    def record_lost_slots(self, now: float, slots: int) -> None:
        """Record that `slots` taken slots no longer exist."""
        self._advance(now)
        self.running -= slots

    def tokens_per_s(self, slots: int) -> float | None:
        """Return the throughput of `slots` slots while all are taken; never 0. None if it is unknown. It is unknown
        after too few answers, or without slots because every replica drains or has an open breaker.
        """
        if slots <= 0 or self._answers < MIN_ANSWERS or self._held_s <= 0:
            return None
        return self._estimated_tokens / self._held_s * slots

    def measured(self) -> MeasuredThroughput | None:
        """Return the measured throughput per slot, or None if it is unknown."""
        if self._answers < MIN_ANSWERS or self._held_s <= 0:
            return None
        return MeasuredThroughput(self._actual_tokens / self._held_s, self._actual_tokens / self._estimated_tokens)

    def answer_duration_s(self, tokens: int) -> float:
        """Return how long an answer of `tokens` estimated tokens takes; 0 while the throughput is unknown. The estimate
        is an upper bound of the answer's length. So the result is at most twice the mean of all answers.
        """
        if self._answers < MIN_ANSWERS or self._held_s <= 0:
            return 0.0
        return min(tokens / self._estimated_tokens, 2 / self._answers) * self._held_s

    def _advance(self, now: float) -> None:
        self._held_s += self.running * (now - self._at_s)
        self._at_s = now


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """The wait estimate sent to a waiting client. None means unknown. `bytes_to_bring` bytes must still be loaded, the
    slowest from `tier`. `problem` says why no replica starts.
    """

    remaining_s: float | None = None
    bytes_to_bring: int | None = None
    tier: str | None = None
    problem: StartProblem | None = None

    def heartbeat_text(self) -> str:
        """Format it for a heartbeat: ` remaining_s=1.3 tier=nvme bytes=5697536`, ` reason=no_room`."""
        text = "" if self.remaining_s is None else f" remaining_s={self.remaining_s:.1f}"
        text += f" tier={self.tier} bytes={self.bytes_to_bring}" if self.tier is not None else ""
        return text + ("" if self.problem is None else f" reason={self.problem.reason}")


UNKNOWN: Final = WaitEstimate()


@dataclass(slots=True)
class StartForecasts:
    """When versions at zero are expected to serve, as the control plane forecasts it. Times are monotonic seconds."""

    _start_durations_s: dict[VersionKey, float] = field(default_factory=dict)  # duration of a start
    _running_starts: dict[VersionKey, tuple[float, Forecast]] = field(default_factory=dict)  # forecast end of the start
    _problems: dict[VersionKey, StartProblem] = field(default_factory=dict)  # why a version does not start

    def set_start_duration(self, key: VersionKey, row: StartRow) -> None:
        """Record how long a start of this version, which is at zero, would take."""
        self._start_durations_s[key] = row.start_ms / 1000

    def set_forecast(self, key: VersionKey, forecast: Forecast, now: float) -> None:
        """Record that the version starts, and when it is expected to be ready."""
        self._running_starts[key] = now + forecast.ready_in_ms / 1000, forecast

    def set_problem(self, key: VersionKey, problem: StartProblem | None) -> None:
        """Record why the version does not start; None if nothing is known to prevent it."""
        if problem is None:
            self._problems.pop(key, None)
        else:
            self._problems[key] = problem

    def problem(self, key: VersionKey) -> StartProblem | None:
        """Return why the version does not start, if that is known."""
        return self._problems.get(key)

    def clear_failed_start(self, tenant: str, version: str) -> None:
        """Forget the forecast of a start that failed. It says nothing about the next one."""
        for key in [key for key in self._running_starts if (key.tenant, key.version) == (tenant, version)]:
            del self._running_starts[key]

    def clear_version(self, key: VersionKey) -> None:
        """Forget all forecasts and problems of a version that has a replica or was deleted."""
        self._running_starts.pop(key, None)
        self._start_durations_s.pop(key, None)
        self._problems.pop(key, None)

    def keys(self) -> Set[VersionKey]:
        """Return all versions about which something is known."""
        return self._start_durations_s.keys() | self._running_starts.keys() | self._problems.keys()

    def clear(self) -> None:
        """Forget what the following snapshot repeats. Running starts stay, since a snapshot does not contain them."""
        self._start_durations_s.clear()
        self._problems.clear()

    def wait_estimate(self, key: VersionKey, now: float) -> WaitEstimate:
        """Return the estimate for a request that waits for the first replica."""
        problem = self._problems.get(key)
        if (start := self._running_starts.get(key)) is not None:
            ready_at_s, forecast = start
            if now <= ready_at_s + OVERDUE_S:
                return WaitEstimate(max(0.0, ready_at_s - now), forecast.bytes_to_bring, forecast.tier, problem)
            del self._running_starts[key]
        return WaitEstimate(self._start_durations_s.get(key), problem=problem)


def wait_s(tokens_before: int, tokens_per_s: float | None) -> float | None:
    """Return the seconds until `tokens_before` tokens are served; None if the throughput is unknown."""
    return None if tokens_per_s is None else tokens_before / tokens_per_s


def is_too_late(wait_s: float | None, remaining_s: float) -> bool:
    """Return whether the wait is known to be longer than the remaining time."""
    return wait_s is not None and wait_s > remaining_s


def redact_for_caller(problem: StartProblem, is_owner: bool) -> StartProblem:
    """Return what a caller may read. A guest of another tenant's model gets only the reason."""
    if is_owner:
        return problem
    return StartProblem(reason=problem.reason, message=f"{problem.reason}; the model's owner can see more")
