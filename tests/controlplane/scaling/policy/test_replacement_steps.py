"""The next step of a replica that is to be replaced, and which previous version keeps serving beside a new one."""

import pytest

from controlplane.scaling.policy.replacement_steps import (
    ReplacedReplica,
    ReplacementStep,
    choose_step_if_damaged,
    next_replacement_step,
    previous_versions,
)
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from kelvin.contracts.errors import Unavailable
from kelvin.contracts.traffic_errors import Overloaded

OVERLAP_S = 120.0
FAILURE = Unavailable("the cache")
LACKS_MEMORY = Overloaded("this machine", 1, 1.0, "bytes of memory")
READY, RELIEVED = ReplicaState.READY, ReplicaState.RELIEVED


@pytest.mark.parametrize(
    ("old", "want"),
    [
        pytest.param(
            ReplacedReplica(state=READY), ReplacementStep.BESIDE, id="a free slot: the new one starts beside it"
        ),
        pytest.param(
            ReplacedReplica(state=READY, has_room=False),
            ReplacementStep.AFTER,
            id="no free slot: the new one starts after it",
        ),
        pytest.param(
            ReplacedReplica(state=READY, failure=FAILURE), ReplacementStep.BESIDE, id="a failure from before its turn"
        ),
        pytest.param(
            ReplacedReplica(state=RELIEVED, start_step=ReplacementStep.BESIDE, coming=1),
            ReplacementStep.WAIT,
            id="it serves until the new one is ready",
        ),
        pytest.param(
            ReplacedReplica(state=ReplicaState.DRAINING, start_step=ReplacementStep.BESIDE, is_new_ready=True),
            ReplacementStep.WAIT,
            id="it finishes its requests",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.BESIDE, is_new_ready=True),
            ReplacementStep.OVER,
            id="it is gone, a new one serves",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.AFTER, coming=1),
            ReplacementStep.WAIT,
            id="it is gone, the new one restores",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.AFTER, coming=1, failure=FAILURE),
            ReplacementStep.WAIT,
            id="a start failed, another one is coming",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.AFTER, failure=FAILURE),
            ReplacementStep.FAILED,
            id="it is gone, and the new one failed",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.AFTER, is_new_ready=True, failure=FAILURE),
            ReplacementStep.OVER,
            id="one start failed, another is ready",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.BESIDE),
            ReplacementStep.OVER,
            id="it is gone, and fewer are wanted",
        ),
        pytest.param(ReplacedReplica(state=None), ReplacementStep.OVER, id="it died before its turn"),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE, failure=FAILURE),
            ReplacementStep.FAILED,
            id="its new replica failed, so it serves on",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE),
            ReplacementStep.FAILED,
            id="it serves on for an unknown reason",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE, failure=LACKS_MEMORY),
            ReplacementStep.AFTER,
            id="no memory for two: the new one starts after it",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.AFTER, failure=LACKS_MEMORY),
            ReplacementStep.FAILED,
            id="no memory for one",
        ),
        pytest.param(
            ReplacedReplica(state=ReplicaState.RESTORING),
            ReplacementStep.WAIT,
            id="it restores: wait until it is ready",
        ),
        pytest.param(ReplacedReplica(state=ReplicaState.DOZING), ReplacementStep.WAIT, id="it falls asleep"),
        pytest.param(ReplacedReplica(state=ReplicaState.ASLEEP), ReplacementStep.END, id="it sleeps"),
        pytest.param(
            ReplacedReplica(state=ReplicaState.DEEP_SLEEP), ReplacementStep.END, id="it sleeps without weights"
        ),
        pytest.param(ReplacedReplica(state=ReplicaState.ENDING), ReplacementStep.WAIT, id="it ends already"),
    ],
)
def test_next_step(old: ReplacedReplica, want: ReplacementStep) -> None:
    """The table has every state that an order can meet. Only a wait has a time limit."""
    assert next_replacement_step(old, 10.0, 10.0) is want
    assert next_replacement_step(old, 10.1, 10.0) is (ReplacementStep.LATE if want is ReplacementStep.WAIT else want)


_DAMAGED = {
    ReplacementStep.CONDEMN: {READY, RELIEVED, ReplicaState.DOZING, ReplicaState.DRAINING},
    ReplacementStep.END: {ReplicaState.RESTORING, ReplicaState.ASLEEP, ReplicaState.DEEP_SLEEP},
}


@pytest.mark.parametrize("state", ReplicaState)
def test_damaged_replica_always_ends(state: ReplicaState) -> None:
    """A replica that may still answer is told of the damage; one that serves no request is ended. Others have no
    version or are ending.
    """
    assert choose_step_if_damaged(state) is next(
        (step for step, states in _DAMAGED.items() if state in states), ReplacementStep.WAIT
    )


@pytest.mark.parametrize(
    ("named", "since_s", "want"),
    [
        pytest.param("b", {"a": 0.0}, {"b": "a"}, id="it was never ready"),
        pytest.param("b", {"a": 0.0, "b": 900.0}, {"b": "a"}, id="it became ready just now"),
        pytest.param("b", {"a": 0.0, "b": 880.0}, {}, id="it has been ready for long enough"),
        pytest.param("a", {"a": 0.0, "b": 900.0}, {}, id="the alias went back to an old version"),
        pytest.param("b", {}, {}, id="there is no other"),
        pytest.param("b", {"b": 900.0}, {}, id="there is no other any more"),
        pytest.param("ab", {"a": 0.0}, {"b": "a"}, id="a traffic split: the ready one of the two"),
        pytest.param(
            "ab", {"a": 0.0, "c": 800.0}, {"b": "a"}, id="a named version comes before a later one without a name"
        ),
        pytest.param("d", {"a": 0.0, "c": 800.0}, {"d": "c"}, id="the latest of those without a name"),
        pytest.param("bc", {"a": 0.0}, {"b": "a", "c": "a"}, id="both are new"),
        pytest.param("b", {"a": 900.0, "b": 900.0}, {}, id="both seen at once, as after a restart"),
    ],
)
def test_recently_ready_version_has_a_previous_version(
    named: str, since_s: dict[str, float], want: dict[str, str]
) -> None:
    """The time is second 1000. Each version is one letter."""
    assert previous_versions(frozenset(named), since_s, 1000.0, OVERLAP_S) == want


@pytest.mark.parametrize(("since_s", "want"), [({"a": 0.0}, {"b": "a"}), ({"a": 0.0, "b": 1000.0}, {})])
def test_no_overlap_after_first_replica(since_s: dict[str, float], want: dict[str, str]) -> None:
    """Without overlap time the previous version serves only until the new one's first replica."""
    assert previous_versions("b", since_s, 1000.0, 0.0) == want
