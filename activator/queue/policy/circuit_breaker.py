"""When to stop asking what fails, and how to find out that it no longer does.

Closed, all pass. After so many failures in a row, or one that says enough, it opens: nobody passes for a while. Then it
is half open: one at a time may try. A failure opens it for twice as long, up to a bound. After a success its owner
drops it. Who leaves without having found out makes room for the next who tries.
"""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """How many failures in a row open it, and for how long it is open at first and at the most."""

    failures: int
    first_s: float = 1.0
    longest_s: float = 30.0


class CircuitBreaker:
    """Of one thing that may fail. Times are seconds of one clock that never steps back."""

    __slots__ = ("_failures", "_limits", "_prober", "_rest_s", "_state", "_until_s")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._rest_s = 0.0
        self._until_s = 0.0
        self._prober: object | None = None

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self._state} failures={self._failures} rest={self._rest_s:g}>"

    def state(self, now_s: float) -> BreakerState:
        """As it is now: what was open long enough is half open."""
        if self._state is BreakerState.OPEN and now_s >= self._until_s:
            self._state = BreakerState.HALF_OPEN
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether nobody passes, as it was when it was last looked at."""
        return self._state is BreakerState.OPEN

    @property
    def is_trying(self) -> bool:
        """Whether somebody is finding out."""
        return self._prober is not None

    def takes(self, now_s: float) -> bool:
        """Whether one more may pass."""
        return self.state(now_s) is not BreakerState.OPEN and not self.is_trying

    def remaining_s(self, now_s: float) -> float:
        """Until somebody may try; 0 where one may, or does."""
        return max(0.0, self._until_s - now_s) if self.state(now_s) is BreakerState.OPEN else 0.0

    def enter(self, request: object, now_s: float) -> None:
        """One passes, whom it `takes`: while it is half open, to try."""
        assert self.takes(now_s), f"{self!r} takes nobody"
        if self._state is BreakerState.HALF_OPEN:
            self._prober = request

    def leave(self, request: object) -> None:
        """Who entered is gone, whether or not it found out. Nothing happens to one that was not trying."""
        if self._prober is request:
            self._prober = None

    def failed(self, now_s: float, *, at_once: bool = False) -> bool:
        """It failed; `at_once`: in a way that one time is enough of. Whether that opened it."""
        match self.state(now_s):
            case BreakerState.OPEN:
                return False
            case BreakerState.CLOSED:
                self._failures += 1
                if not at_once and self._failures < self._limits.failures:
                    return False
                self._rest_s = self._limits.first_s
            case BreakerState.HALF_OPEN:
                self._rest_s *= 2
        self._rest_s = min(self._rest_s, self._limits.longest_s)
        self._state, self._until_s, self._prober = BreakerState.OPEN, now_s + self._rest_s, None
        return True
