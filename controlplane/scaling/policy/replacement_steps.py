"""Decide how a running replica, or version, is replaced by a new one. Pure.

A healthy replica serves until the new one does, if device slots and memory have room for both. A damaged one leaves at
once: its version then has fewer replicas than desired, and the autoscaler starts another.
`controlplane/scaling/local/replica_replacement.py` asks for the steps, and `scaling/local/local_actuator.py` carries
them out.

A new version has no replica at first, then one, and the desired number only a while later. Until then the previous
version takes the requests that the new one can't, with the replicas that it still has awake. So no request waits for a
start because of a deploy. On a cluster, Knative replaces the pods of one version by itself.
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
    """The next step for a replica that is being replaced."""

    BESIDE = "beside"  # start the new replica in its own slot; drain the old one once the new one serves
    AFTER = "after"  # drain the old replica; the new one takes its slot
    CONDEMN = "condemn"  # drain it, and abort at once the requests that it computes from damaged memory
    END = "end"  # end it: it serves no request
    WAIT = "wait"
    OVER = "over"  # it is gone, and its replacement serves if one was needed
    FAILED = "failed"  # no new replica took its place
    LATE = "late"  # the time limit is over


_CONDEMNED: Final = SERVING | {ReplicaState.DOZING, ReplicaState.DRAINING}
_ENDED: Final = SLEEPING | {ReplicaState.RESTORING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedReplica:
    """A replica that existed when the order was given. `state` is None once it is dead.

    `start_step` is how its replacement was started: BESIDE, AFTER, or None. `coming` counts the version's replicas that
    are starting. Since the replacement was started, `is_new_ready` says whether a new replica is ready, and `failure`
    is why a start of the version failed.
    """

    state: ReplicaState | None
    start_step: ReplacementStep | None = None
    has_room: bool = True  # a device slot is free
    coming: int = 0
    is_new_ready: bool = False
    failure: Failure | None = None


def next_replacement_step(old: ReplacedReplica, waited_s: float, limit_s: float) -> ReplacementStep:
    """Return the first that applies.

    1. The old replica is dead. OVER if no replacement was started or it is ready. Otherwise wait for a replica that is
       starting. If none is: FAILED after a failed start, otherwise OVER.
    2. It sleeps: end it. The next request starts a new one.
    3. It is ready, and no replacement was started: BESIDE if a slot is free, otherwise AFTER.
    4. It is ready again, because the replacement failed. AFTER if memory has no room for both, otherwise FAILED.
    5. It is changing its state: wait, for `limit_s` at most.
    """
    is_late = waited_s > limit_s
    # (1)
    if old.state is None:
        if old.start_step is None or old.is_new_ready:
            return ReplacementStep.OVER
        if old.coming:
            return ReplacementStep.LATE if is_late else ReplacementStep.WAIT
        # Without a failure, the autoscaler wants fewer replicas by now.
        return ReplacementStep.OVER if old.failure is None else ReplacementStep.FAILED
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
    """Return the step for a replica whose memory is damaged. Memory can't be repaired while it is mapped."""
    if state in _CONDEMNED:
        return ReplacementStep.CONDEMN
    return ReplacementStep.END if state in _ENDED else ReplacementStep.WAIT


def recently_ready_versions(
    named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float
) -> list[str]:
    """Return the named versions that were not ready `overlap_s` ago. `ready_since_s` has those that ever were."""
    return [version for version in sorted(named) if now_s - ready_since_s.get(version, inf) < overlap_s]


def previous_versions(
    named: Collection[str], ready_since_s: Mapping[str, float], now_s: float, overlap_s: float
) -> dict[str, str]:
    """Return for each recently ready version the one that was ready before it: a named one, otherwise the latest."""
    found: dict[str, str] = {}
    for version in recently_ready_versions(named, ready_since_s, now_s, overlap_s):
        since_s = ready_since_s.get(version, inf)
        before = [(other in named, at_s, other) for other, at_s in ready_since_s.items() if at_s < since_s]
        if before:
            found[version] = max(before)[2]
    return found
