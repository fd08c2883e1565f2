"""The life of a replica: which events move a standby, a runtime or a job where. Pure.

Two rules are in the table's shape: a replica that serves ends only through a drain, and a process that has run a job
or was bound once never takes anything else: one that sleeps wakes to the version that it has.
"""

from enum import StrEnum
from typing import Final


class IllegalMove(ValueError):
    """The event can't happen in that state; the state stays as it was."""


class ReplicaState(StrEnum):
    """Where a forked process is, as the control plane knows it."""

    FORKED = "forked"  # asked of the zygote, not parked yet
    STANDBY = "standby"  # parked: takes any version
    JOB = "job"  # runs a gate or a seal, once
    RESTORING = "restoring"
    READY = "ready"
    RELIEVED = "relieved"  # serves until another one has its place, which counts for it from now on
    DOZING = "dozing"  # was told to sleep: gets nothing new, holds its slot
    ASLEEP = "asleep"  # keeps the version's weights in host memory; holds no slot
    ASLEEP2 = "asleep2"  # gave the weights back, too: keeps its process
    DRAINING = "draining"  # finishes what it has, gets nothing new
    ENDING = "ending"  # was told to end, is not dead yet


class ReplicaEvent(StrEnum):
    """What happened to it. Its death is not here: it may come in any state, and nothing comes after it."""

    PARKED = "parked"
    TOOK_JOB = "took_job"
    BIND = "bind"
    BOUND = "bound"
    RELIEVE = "relieve"
    KEPT = "kept"  # nobody took its place
    DOZE = "doze"
    SLEPT = "slept"
    ROUSED = "roused"  # it did not fall asleep
    DROPPED = "dropped"  # it gave its weights back
    WAKE = "wake"
    DRAIN = "drain"
    END = "end"


_S, _E = ReplicaState, ReplicaEvent
MOVES: Final[dict[tuple[ReplicaState, ReplicaEvent], ReplicaState]] = {
    (_S.FORKED, _E.PARKED): _S.STANDBY,
    (_S.FORKED, _E.END): _S.ENDING,
    (_S.STANDBY, _E.TOOK_JOB): _S.JOB,
    (_S.STANDBY, _E.BIND): _S.RESTORING,
    (_S.STANDBY, _E.END): _S.ENDING,
    (_S.JOB, _E.END): _S.ENDING,
    (_S.RESTORING, _E.BOUND): _S.READY,
    (_S.RESTORING, _E.END): _S.ENDING,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.RELIEVE): _S.RELIEVED,
    (_S.RELIEVED, _E.KEPT): _S.READY,
    (_S.RELIEVED, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.DOZE): _S.DOZING,
    (_S.DOZING, _E.SLEPT): _S.ASLEEP,
    (_S.DOZING, _E.ROUSED): _S.READY,
    (_S.DOZING, _E.WAKE): _S.RESTORING,  # once it sleeps: it is on its way to a caller
    (_S.DOZING, _E.DRAIN): _S.DRAINING,
    (_S.ASLEEP, _E.DROPPED): _S.ASLEEP2,
    (_S.ASLEEP, _E.WAKE): _S.RESTORING,
    (_S.ASLEEP, _E.END): _S.ENDING,
    (_S.ASLEEP2, _E.WAKE): _S.RESTORING,
    (_S.ASLEEP2, _E.END): _S.ENDING,
    (_S.DRAINING, _E.END): _S.ENDING,
}
LIVE: Final = frozenset({_S.RESTORING, _S.READY})  # what counts as a replica of its version
SERVING: Final = frozenset({_S.READY, _S.RELIEVED})  # what takes requests
SLEEPING: Final = frozenset({_S.ASLEEP, _S.ASLEEP2})


def move(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """The state after the event. Raises IllegalMove."""
    try:
        return MOVES[state, event]
    except KeyError:
        raise IllegalMove(f"a replica that is {state} can't {event}") from None
