"""A circuit breaker: when to stop sending requests to a failing target, and how to find out that it works again.

1. Closed: all requests pass. It opens after `failures` failures in a row, or after one that is proof enough.
2. Open: no request passes for a while.
3. Half-open: one request at a time passes, as a trial. A failure opens the breaker for twice as long, up to a bound.
   After a success its owner drops the breaker. A trial request that leaves without a result makes room for the next.
"""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """The state of a breaker: whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """How many failures in a row open the breaker, and its first and longest open time in seconds."""

    failures: int
    first_s: float = 1.0
    longest_s: float = 30.0


class CircuitBreaker:
    """The breaker of one target. Times are seconds of one monotonic clock."""

    __slots__ = ("_failures", "_limits", "_open_s", "_state", "_trial_request", "_until_s")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._open_s = 0.0
        self._until_s = 0.0
        self._trial_request: object | None = None

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self._state} failures={self._failures} rest={self._open_s:g}>"

    def state(self, now_s: float) -> BreakerState:
        """Return the current state. An open breaker becomes half-open when its time is over."""
        if self._state is BreakerState.OPEN and now_s >= self._until_s:
            self._state = BreakerState.HALF_OPEN
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether no request passes, as of the last call of `state`."""
        return self._state is BreakerState.OPEN

    @property
    def has_trial_request(self) -> bool:
        """Whether a trial request is running."""
        return self._trial_request is not None

    def allows_request(self, now_s: float) -> bool:
        """Return whether one more request may pass."""
        return self.state(now_s) is not BreakerState.OPEN and not self.has_trial_request

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until a trial may pass; 0 if one may pass now, or is running."""
        return max(0.0, self._until_s - now_s) if self.state(now_s) is BreakerState.OPEN else 0.0

    def enter(self, request: object, now_s: float) -> None:
        """Let a request pass, which is the trial if the breaker is half-open. `allows_request` must be true."""
        assert self.allows_request(now_s), f"{self!r} takes nobody"
        if self._state is BreakerState.HALF_OPEN:
            self._trial_request = request

    def leave(self, request: object) -> None:
        """End the trial if this request was it, with or without a result."""
        if self._trial_request is request:
            self._trial_request = None

    def record_failure(self, now_s: float, *, at_once: bool = False) -> bool:
        """Record a failure and return whether it opened the breaker. `at_once`: this one failure is enough."""
        match self.state(now_s):
            case BreakerState.OPEN:
                return False
            case BreakerState.CLOSED:
                self._failures += 1
                if not at_once and self._failures < self._limits.failures:
                    return False
                self._open_s = self._limits.first_s
            case BreakerState.HALF_OPEN:
                self._open_s *= 2
        self._open_s = min(self._open_s, self._limits.longest_s)
        self._state, self._until_s, self._trial_request = BreakerState.OPEN, now_s + self._open_s, None
        return True
