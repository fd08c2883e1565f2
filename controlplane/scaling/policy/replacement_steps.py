"""Decide how a running replica, or version, is replaced by a new one. Pure.

A healthy replica serves until a new one does, if device slots and memory hold both. A damaged one leaves at once: its
version then has fewer replicas than are wanted, and the decider starts another.
`controlplane/scaling/local/replica_replacement.py` asks and `scaling/local/local_actuator.py` carries the steps out.

A new version has no replica yet, then one, and the wanted number only a while later. Until then the version before it
takes the requests that the new one can't, as far as it is awake, so that no request waits for a start because of a
deploy. On a cluster, Knative replaces the pods of one version by itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from controlplane.scaling.policy.replica_lifecycle import SERVING, SLEEPING, ReplicaState
from kelvin.contracts.errors import Failure
from kelvin.contracts.traffic_errors import Overloaded


class ReplacementStep(StrEnum):
    """What to do now about a replica that is to be replaced."""

    BESIDE = "beside"  # begin a new one in a slot of its own; drain the old one once the new one serves
    AFTER = "after"  # drain the old one; the new one takes its slot
    CONDEMN = "condemn"  # drain it, and end at once what it computes over damaged memory
    END = "end"  # it serves nobody
    WAIT = "wait"
    OVER = "over"  # it is gone, and what should come for it has come
    FAILED = "failed"  # no new one took its place
    LATE = "late"  # the time is over


_CONDEMNED: Final = SERVING | {ReplicaState.DOZING, ReplicaState.DRAINING}
_ENDED: Final = SLEEPING | {ReplicaState.RESTORING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedReplica:
    """A replica that was there when the order came. `state` is None once it is dead.

    `start_step` is how a new one was begun: BESIDE, AFTER, or None. `coming` is how many of its version are on their
    way; `is_new_ready`, whether a new one is ready since one was begun; `failure`, why a start of its version failed
    since.
    """

    state: ReplicaState | None
    start_step: ReplacementStep | None = None
    has_room: bool = True  # a device slot is free
    coming: int = 0
    is_new_ready: bool = False
    failure: Failure | None = None


def next_replacement_step(old: ReplacedReplica, waited_s: float, limit_s: float) -> ReplacementStep:
    """Return the first that applies.

    1. It is dead: over, unless a new one was begun and has not come. Then wait for one on its way, or fail.
    2. It sleeps: end it. The next request starts a new one.
    3. It is ready, and no new one was begun: begin one beside it if a slot is free, otherwise after it.
    4. It is ready again, because the new one beside it failed. If memory does not hold two, begin one after it;
       otherwise fail.
    5. It is on its way to another state: wait, for `limit_s` at most.
    """
    is_late = waited_s > limit_s
    # (1)
    if old.state is None:
        if old.start_step is None or old.is_new_ready:
            return ReplacementStep.OVER
        if old.coming:
            return ReplacementStep.LATE if is_late else ReplacementStep.WAIT
        return (
            ReplacementStep.OVER if old.failure is None else ReplacementStep.FAILED
        )  # without a failure, fewer are wanted meanwhile
    # (2)
    if old.state in SLEEPING:
        return ReplacementStep.END
    if old.state is ReplicaState.READY:
        # (3)
        if old.start_step is None:
            return ReplacementStep.BESIDE if old.has_room else ReplacementStep.AFTER
        # (4)
        lacks_memory = old.failure is not None and old.failure.code == Overloaded.code
        return (
            ReplacementStep.AFTER
            if lacks_memory and old.start_step is ReplacementStep.BESIDE
            else ReplacementStep.FAILED
        )
    # (5)
    return ReplacementStep.LATE if is_late else ReplacementStep.WAIT


def choose_step_if_damaged(state: ReplicaState) -> ReplacementStep:
    """Return what to do about a replica whose memory was found wrong: it can't be mended while it is mapped."""
    if state in _CONDEMNED:
        return ReplacementStep.CONDEMN
    return ReplacementStep.END if state in _ENDED else ReplacementStep.WAIT


def recently_ready_versions(
    named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float
) -> list[str]:
    """Return the named versions that were not ready `overlap_s` ago. `ready_since_s` has those that have been once."""
    return [version for version in sorted(named) if now_s - ready_since_s.get(version, inf) < overlap_s]


def previous_versions(
    named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float
) -> dict[str, str]:
    """Return for each young version the one that was ready before it, if any: a named one, otherwise the latest."""
    found: dict[str, str] = {}
    for version in recently_ready_versions(named, ready_since_s, now_s, overlap_s):
        since_s = ready_since_s.get(version, inf)
        before = [(other in named, at_s, other) for other, at_s in ready_since_s.items() if at_s < since_s]
        if before:
            found[version] = max(before)[2]
    return found
