"""Which steps of a model's ladder a request takes, by the wait that it can expect. Pure state; what a step is, and
whether it is one for this request, is its caller's.

A step that asks for a wait is taken from that wait on, the last that is reached first. One that asks for none, and any
other one that was not tried, is tried only in the place of a refusal, from the first on. Who says of itself that it is
less urgent is patient for less.
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
}  # of the wait that a step asks for
RELIEF_RATIO: Final = 0.5  # of a wait, above which a shorter one is none
HOLD_S: Final = 5.0  # that a wait counts after it was seen last
MAX_WAITS: Final = 4096  # waits, of which there is one for each that calls

K = TypeVar("K")


def steps_for_wait(
    ladder: Sequence[DegradationStep], wait_s: float, priority_class: PriorityClass, *, is_start: bool = False
) -> tuple[DegradationStep, ...]:
    """Steps that such a wait asks for, as they are tried in turn. Of a start a shorter answer spares nothing."""
    patience = PATIENCE[priority_class]
    return tuple(
        step
        for step in reversed(ladder)
        if step.wait_s is not None
        and wait_s >= step.wait_s * patience
        and not (is_start and isinstance(step, CapOutput))
    )


def is_recoverable(status: int, code: str) -> bool:
    """Whether a refusal is of a kind that another way may spare: what is busy, away or too slow, not what is wrong."""
    return status >= 500 and code != Internal.code


def helps_against(step: DegradationStep, code: str) -> bool:
    """Whether the step may help who is refused with that code. A shorter answer is no help where none begins."""
    return code == Overloaded.code if isinstance(step, CapOutput) else True


@dataclass(frozen=True, slots=True)
class _Seen:
    wait_s: float
    at_s: float  # when it, or half of it, was seen last


@dataclass(slots=True)
class WaitHysteresis(Generic[K]):
    """What each may expect to wait, so that who is at the edge of a step does not go up and down with every request: a
    longer wait counts at once, a shorter one once no more than half of it was seen for a while.
    """

    _seen: dict[K, _Seen] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._seen)

    def seen(self, key: K, wait_s: float, now_s: float) -> float:
        """The wait that counts, of one that is seen now. Seconds of one clock that never steps back."""
        held = self._seen.get(key)
        if held is not None and wait_s < held.wait_s:
            if wait_s > held.wait_s * RELIEF_RATIO:
                self._seen[key] = _Seen(held.wait_s, now_s)
                return held.wait_s
            if now_s - held.at_s < HOLD_S:
                return held.wait_s
        self._seen.pop(key, None)
        if wait_s > 0:
            self._seen[key] = _Seen(wait_s, now_s)
            if len(self._seen) > MAX_WAITS:
                del self._seen[next(iter(self._seen))]
        return wait_s
