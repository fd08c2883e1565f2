"""Choose which replicas of a version leave when fewer are wanted, and which stay because none took their place. Pure.

`scaling/local/local_actuator.py` carries it out. How many are wanted is decided in `kpa.py` and `scale_to_zero.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.scaling.policy.replica_lifecycle import LIVE, SERVING, SLEEPING, ReplicaState

_DRAINED: Final = SERVING | {ReplicaState.DOZING}  # others serve nobody, and end at once


@dataclass(frozen=True, slots=True)
class VersionReplica:
    """A replica of the version, in its state since `since_us`."""

    runtime_id: str
    state: ReplicaState
    since_us: int


@dataclass(frozen=True, slots=True)
class ScaleDownPlan:
    """How many starts are given up, the youngest first, and which replicas are drained or ended."""

    starts: int
    drained: tuple[str, ...]
    ended: tuple[str, ...]


def plan_scale_down(starts: int, replicas: Sequence[VersionReplica], wanted: int) -> ScaleDownPlan:
    """Return what leaves so that `wanted` replicas are left. `replicas` are in the order in which they were added.

    1. Over `wanted`: starts first, then what restores, then what serves. The youngest leave: the oldest has the warmest
       caches.
    2. A relieved replica serves until a new one has its place. The oldest of them leave as soon as those that serve
       without them are enough.
    3. At zero, what sleeps or falls asleep leaves as well.
    """
    # (1)
    live = sorted(
        (each for each in replicas if each.state in LIVE),
        key=lambda each: (each.state is ReplicaState.READY, -each.since_us),
    )
    surplus = max(0, starts + len(live) - wanted)
    given_up = min(starts, surplus)
    gone, left = live[: surplus - given_up], live[surplus - given_up :]
    # (2)
    relieved = [each for each in replicas if each.state is ReplicaState.RELIEVED]
    serving = len(relieved) + sum(each.state is ReplicaState.READY for each in left)
    gone += relieved[: max(0, serving - wanted)]
    # (3)
    if wanted == 0:
        gone += [each for each in replicas if each.state in SLEEPING or each.state is ReplicaState.DOZING]
    return ScaleDownPlan(
        given_up,
        tuple(each.runtime_id for each in gone if each.state in _DRAINED),
        tuple(each.runtime_id for each in gone if each.state not in _DRAINED),
    )


def choose_replicas_to_keep(starts: int, replicas: Sequence[VersionReplica]) -> tuple[str, ...]:
    """Return the relieved replicas that no start or restore is there to replace, the youngest. They serve on."""
    coming = starts + sum(each.state is ReplicaState.RESTORING for each in replicas)
    return tuple(each.runtime_id for each in replicas if each.state is ReplicaState.RELIEVED)[coming:]
