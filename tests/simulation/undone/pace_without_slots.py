"""A version whose replicas all drain or rest has a pace of 0, and an estimated wait divides by it: the error ends the
feed's task and with it the door.
"""

from activator.policy.expected import LEAST, Pace
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"ZeroDivisionError"
SEED = 440_823_190_563


def _tokens_per_s(self: Pace, slots: int) -> float | None:
    return self._tokens / self._held_s * slots if self._answers >= LEAST and self._held_s > 0 else None


def undo(undoing: Undoing) -> None:
    undoing.method(Pace, "tokens_per_s", _tokens_per_s)
