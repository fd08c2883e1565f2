"""Decide which steps of a degradation policy a request takes, by its expected wait. Pure state; `degradation.py`
applies them.

1. Before the request is queued, each step whose wait is reached is tried, the last one first.
2. If the request is refused, all other steps are tried, the first one first.

A less urgent request degrades after a shorter wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from activator.queue.policy.queued_request import PriorityClass
from kelvin.contracts.errors import Internal
from kelvin.contracts.serving.degradation_steps import CapOutput, DegradationStep
from kelvin.contracts.traffic_errors import Overloaded

PATIENCE: Final = {
    PriorityClass.BATCH: 0.25,
    PriorityClass.STANDARD: 0.5,
    PriorityClass.INTERACTIVE: 1.0,
}  # fraction of a step's wait
RELIEF_RATIO: Final = 0.5  # a wait above this fraction of the longest does not count as shorter
HOLD_S: Final = 5.0  # how long a wait counts after it was last seen
MAX_WAITS: Final = 4096  # bound on kept waits

K = TypeVar("K")


def steps_for_wait(
    steps: Sequence[DegradationStep], wait_s: float, priority_class: PriorityClass, *, is_start: bool = False
) -> tuple[DegradationStep, ...]:
    """Return the steps to try for this expected wait, those of the longest wait first. `steps` ascends by `wait_s`. A
    shorter output does not help against a start.
    """
    patience = PATIENCE[priority_class]
    return tuple(
        step
        for step in reversed(steps)
        if step.wait_s is not None
        and wait_s >= step.wait_s * patience
        and not (is_start and isinstance(step, CapOutput))
    )


def is_recoverable(status: int, code: str) -> bool:
    """Return whether degradation may avoid this refusal: busy, away or too slow, but not an invalid request."""
    return status >= 500 and code != Internal.code


def helps_against(step: DegradationStep, code: str) -> bool:
    """Return whether the step may help against this failure. A shorter output helps only against an overload."""
    return code == Overloaded.code if isinstance(step, CapOutput) else True


@dataclass(frozen=True, slots=True)
class _HeldWait:
    wait_s: float
    confirmed_at_s: float  # when a wait above half of it was last seen


@dataclass(slots=True)
class WaitHysteresis(Generic[K]):
    """Expected waits with hysteresis, so that requests near a threshold do not alternate between steps. A longer wait
    counts at once. A shorter one counts after no wait above half of the longer one was seen for a while.
    """

    _waits: dict[K, _HeldWait] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waits)

    def record_wait(self, key: K, wait_s: float, now_s: float) -> float:
        """Record a wait and return the one that counts. Times are seconds of one monotonic clock."""
        held = self._waits.get(key)
        if held is not None and wait_s < held.wait_s:
            if wait_s > held.wait_s * RELIEF_RATIO:
                self._waits[key] = _HeldWait(held.wait_s, now_s)
                return held.wait_s
            if now_s - held.confirmed_at_s < HOLD_S:
                return held.wait_s
        self._waits.pop(key, None)
        if wait_s > 0:
            self._waits[key] = _HeldWait(wait_s, now_s)
            if len(self._waits) > MAX_WAITS:
                del self._waits[next(iter(self._waits))]
        return wait_s
