"""What is due next for a replica that is to be replaced by a new one. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from controlplane.policy.replica_life import SLEEPING, ReplicaState


class Step(StrEnum):
    """What to do about it now."""

    RELIEVE = "relieve"  # have another one take its place
    END = "end"  # it serves nobody: the next start is a new one
    WAIT = "wait"
    OVER = "over"  # it is gone, and what should come for it has come
    FAILED = "failed"  # none took its place


@dataclass(frozen=True, slots=True)
class Due:
    """A replica that was there when the order came. `state` is None once it is dead.

    `coming` is how many of its version are on their way; `came`, whether a new one is ready since it was relieved;
    `has_failed`, whether a start of its version has failed since.
    """

    state: ReplicaState | None
    relieved: bool
    coming: int = 0
    came: bool = False
    has_failed: bool = False


def step(due: Due) -> Step:
    """A replica that was told to go is waited for until it is dead: the next one's turn comes after it."""
    if due.state is None:
        return _when_gone(due)
    if due.state in SLEEPING:
        return Step.END
    if due.state is ReplicaState.READY:
        return Step.FAILED if due.relieved else Step.RELIEVE
    return Step.WAIT


def _when_gone(due: Due) -> Step:
    if not due.relieved or due.came:
        return Step.OVER
    if due.coming:
        return Step.WAIT
    return Step.FAILED if due.has_failed else Step.OVER  # else fewer are wanted meanwhile
