"""Transition table of a replica: which event moves a standby, a runtime or a job to which state. Pure.

The table enforces two rules. A replica that serves ends only through a drain. A process that ran a job or was bound
once never gets another version: a sleeping one wakes to its own version.
"""

from enum import StrEnum
from typing import Final


class IllegalReplicaEvent(ValueError):
    """The event is not allowed in that state. The state stays as it was."""


class ReplicaState(StrEnum):
    """The state of a forked process, as the control plane knows it."""

    FORKED = "forked"  # requested from the zygote, not parked yet
    STANDBY = "standby"  # parked: takes any version
    JOB = "job"  # runs one gate or seal job
    RESTORING = "restoring"
    READY = "ready"
    RELIEVED = "relieved"  # serves until its replacement does; no longer counts as a replica
    DOZING = "dozing"  # was told to sleep: gets no new requests, still holds its slot
    ASLEEP = "asleep"  # keeps the version's weights in host memory; holds no slot
    DEEP_SLEEP = "asleep2"  # released the weights as well: only the process is left
    DRAINING = "draining"  # finishes its requests, gets no new ones
    ENDING = "ending"  # was told to end, is not dead yet


class ReplicaEvent(StrEnum):
    """Something that happened to a replica. Its death is not here: it may come in any state, and nothing follows it."""

    PARKED = "parked"
    TOOK_JOB = "took_job"
    BIND = "bind"
    BOUND = "bound"
    RELIEVE = "relieve"
    KEPT = "kept"  # no replacement took its place
    DOZE = "doze"
    SLEPT = "slept"
    ROUSED = "roused"  # it did not fall asleep
    DROPPED = "dropped"  # it released its weights
    WAKE = "wake"
    DRAIN = "drain"
    END = "end"


_S, _E = ReplicaState, ReplicaEvent
TRANSITIONS: Final[dict[tuple[ReplicaState, ReplicaEvent], ReplicaState]] = {
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
    (_S.DOZING, _E.WAKE): _S.RESTORING,  # wakes for a request as soon as it sleeps
    (_S.DOZING, _E.DRAIN): _S.DRAINING,
    (_S.ASLEEP, _E.DROPPED): _S.DEEP_SLEEP,
    (_S.ASLEEP, _E.WAKE): _S.RESTORING,
    (_S.ASLEEP, _E.END): _S.ENDING,
    (_S.DEEP_SLEEP, _E.WAKE): _S.RESTORING,
    (_S.DEEP_SLEEP, _E.END): _S.ENDING,
    (_S.DRAINING, _E.END): _S.ENDING,
}
LIVE: Final = frozenset({_S.RESTORING, _S.READY})  # counts as a replica of its version
SERVING: Final = frozenset({_S.READY, _S.RELIEVED})  # takes requests
SLEEPING: Final = frozenset({_S.ASLEEP, _S.DEEP_SLEEP})


def next_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Return the state after the event. Raises IllegalReplicaEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalReplicaEvent(f"a replica that is {state} can't {event}") from None
