"""What is due next for a replica that is to be replaced; which version answers beside one that was only just named."""

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
        pytest.param(ReplacedReplica(state=READY), ReplacementStep.BESIDE, id="one that serves: a new one beside it"),
        pytest.param(
            ReplacedReplica(state=READY, has_room=False),
            ReplacementStep.AFTER,
            id="without a free slot, the new one after it",
        ),
        pytest.param(
            ReplacedReplica(state=READY, failure=FAILURE), ReplacementStep.BESIDE, id="a failure from before its turn"
        ),
        pytest.param(
            ReplacedReplica(state=RELIEVED, start_step=ReplacementStep.BESIDE, coming=1),
            ReplacementStep.WAIT,
            id="it serves until then",
        ),
        pytest.param(
            ReplacedReplica(state=ReplicaState.DRAINING, start_step=ReplacementStep.BESIDE, is_new_ready=True),
            ReplacementStep.WAIT,
            id="it finishes what it has",
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
            id="it is gone, and no other came",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.AFTER, is_new_ready=True, failure=FAILURE),
            ReplacementStep.OVER,
            id="a failure beside one that came",
        ),
        pytest.param(
            ReplacedReplica(state=None, start_step=ReplacementStep.BESIDE),
            ReplacementStep.OVER,
            id="it is gone, and fewer are wanted",
        ),
        pytest.param(ReplacedReplica(state=None), ReplacementStep.OVER, id="it went by itself before its turn"),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE, failure=FAILURE),
            ReplacementStep.FAILED,
            id="it counts again: none took its place",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE),
            ReplacementStep.FAILED,
            id="it counts again, and nobody knows why",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.BESIDE, failure=LACKS_MEMORY),
            ReplacementStep.AFTER,
            id="memory does not hold two",
        ),
        pytest.param(
            ReplacedReplica(state=READY, start_step=ReplacementStep.AFTER, failure=LACKS_MEMORY),
            ReplacementStep.FAILED,
            id="memory does not hold one",
        ),
        pytest.param(
            ReplacedReplica(state=ReplicaState.RESTORING), ReplacementStep.WAIT, id="it has to be ready to be replaced"
        ),
        pytest.param(ReplacedReplica(state=ReplicaState.DOZING), ReplacementStep.WAIT, id="it falls asleep"),
        pytest.param(ReplacedReplica(state=ReplicaState.ASLEEP), ReplacementStep.END, id="it sleeps"),
        pytest.param(ReplacedReplica(state=ReplicaState.ASLEEP2), ReplacementStep.END, id="it sleeps deeper"),
        pytest.param(ReplacedReplica(state=ReplicaState.ENDING), ReplacementStep.WAIT, id="it ends already"),
    ],
)
def test_next_step(old: ReplacedReplica, want: ReplacementStep) -> None:
    """One rule for each state that an order can meet. Only waiting has an end."""
    assert next_replacement_step(old, 10.0, 10.0) is want
    assert next_replacement_step(old, 10.1, 10.0) is (ReplacementStep.LATE if want is ReplacementStep.WAIT else want)


_DAMAGED = {
    ReplacementStep.CONDEMN: {READY, RELIEVED, ReplicaState.DOZING, ReplicaState.DRAINING},
    ReplacementStep.END: {ReplicaState.RESTORING, ReplicaState.ASLEEP, ReplicaState.ASLEEP2},
}


@pytest.mark.parametrize("state", ReplicaState)
def test_damaged_replica_always_ends(state: ReplicaState) -> None:
    """One that may say something is told so, one that serves nobody ends. Others have no version, or end already."""
    assert choose_step_if_damaged(state) is next(
        (step for step, states in _DAMAGED.items() if state in states), ReplacementStep.WAIT
    )


@pytest.mark.parametrize(
    ("named", "since_s", "want"),
    [
        pytest.param("b", {"a": 0.0}, {"b": "a"}, id="it was never ready: the one before it"),
        pytest.param("b", {"a": 0.0, "b": 900.0}, {"b": "a"}, id="it was ready just now"),
        pytest.param("b", {"a": 0.0, "b": 880.0}, {}, id="it has been for long enough"),
        pytest.param("a", {"a": 0.0, "b": 900.0}, {}, id="back to the one before, which is no new one"),
        pytest.param("b", {}, {}, id="there is no other"),
        pytest.param("b", {"b": 900.0}, {}, id="nor any more"),
        pytest.param("ab", {"a": 0.0}, {"b": "a"}, id="of those that share, the one that is there"),
        pytest.param("ab", {"a": 0.0, "c": 800.0}, {"b": "a"}, id="before a later one that is not named"),
        pytest.param("d", {"a": 0.0, "c": 800.0}, {"d": "c"}, id="of those that are not named the latest"),
        pytest.param("bc", {"a": 0.0}, {"b": "a", "c": "a"}, id="both are new"),
        pytest.param("b", {"a": 900.0, "b": 900.0}, {}, id="seen at once, as by a control plane that begins"),
    ],
)
def test_recently_ready_version_has_a_previous_version(
    named: str, since_s: dict[str, float], want: dict[str, str]
) -> None:
    """At second 1000, of versions with one letter each."""
    assert previous_versions(frozenset(named), since_s, 1000.0, OVERLAP_S) == want


@pytest.mark.parametrize(("since_s", "want"), [({"a": 0.0}, {"b": "a"}), ({"a": 0.0, "b": 1000.0}, {})])
def test_no_overlap_after_first_replica(since_s: dict[str, float], want: dict[str, str]) -> None:
    """Until its first replica, and no longer."""
    assert previous_versions("b", since_s, 1000.0, 0.0) == want
