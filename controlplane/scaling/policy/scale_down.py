"""Choose which replicas of a version leave when fewer are wanted, and which stay because no replacement came. Pure.

`scaling/local/local_actuator.py` carries it out. `kpa.py` and `scale_to_zero.py` decide how many are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.scaling.policy.replica_lifecycle import LIVE, SERVING, SLEEPING, ReplicaState

_DRAINED: Final = SERVING | {ReplicaState.DOZING}  # replicas in other states serve no requests, and end at once


@dataclass(frozen=True, slots=True)
class VersionReplica:
    """A replica of the version, in its state since `since_us`."""

    runtime_id: str
    state: ReplicaState
    since_us: int


@dataclass(frozen=True, slots=True)
class ScaleDownPlan:
    """How many starts are cancelled, the youngest first, and which replicas are drained or ended."""

    starts: int
    drained: tuple[str, ...]
    ended: tuple[str, ...]


def plan_scale_down(starts: int, replicas: Sequence[VersionReplica], wanted: int) -> ScaleDownPlan:
    """Return the starts and replicas to end so that `wanted` remain. `replicas` are in the order of their addition.

    1. Above `wanted`, starts leave first, then restoring replicas, then serving ones. In each group the youngest leave,
       because the oldest has the warmest caches.
    2. A RELIEVED replica serves until its replacement does. The oldest of them leave once enough others serve.
    3. At zero, sleeping replicas and those that fall asleep leave as well.
    """
    # (1)
    live = sorted(
        (each for each in replicas if each.state in LIVE),
        key=lambda each: (each.state is ReplicaState.READY, -each.since_us),
    )
    surplus = max(0, starts + len(live) - wanted)
    given_up = min(starts, surplus)
    leaving, staying = live[: surplus - given_up], live[surplus - given_up :]
    # (2)
    relieved = [each for each in replicas if each.state is ReplicaState.RELIEVED]
    serving = len(relieved) + sum(each.state is ReplicaState.READY for each in staying)
    leaving += relieved[: max(0, serving - wanted)]
    # (3)
    if wanted == 0:
        leaving += [each for each in replicas if each.state in SLEEPING or each.state is ReplicaState.DOZING]
    return ScaleDownPlan(
        given_up,
        tuple(each.runtime_id for each in leaving if each.state in _DRAINED),
        tuple(each.runtime_id for each in leaving if each.state not in _DRAINED),
    )


def choose_replicas_to_keep(starts: int, replicas: Sequence[VersionReplica]) -> tuple[str, ...]:
    """Return the RELIEVED replicas that keep serving: the youngest ones, for which no start or restore is left."""
    coming = starts + sum(each.state is ReplicaState.RESTORING for each in replicas)
    return tuple(each.runtime_id for each in replicas if each.state is ReplicaState.RELIEVED)[coming:]
