"""What is due next for a replica that is to be replaced; which version answers beside one that was only just named."""

import pytest

from contracts.errors import Unavailable
from contracts.traffic_errors import Overloaded
from controlplane.policy.replacement import Old, Step, next_step, step_if_damaged, versions_before
from controlplane.policy.replica_life import ReplicaState

OVERLAP_S = 120.0
FAILURE = Unavailable("the cache")
LACKS_MEMORY = Overloaded("this machine", 1, 1.0, "bytes of memory")
READY, RELIEVED = ReplicaState.READY, ReplicaState.RELIEVED


@pytest.mark.parametrize(
    ("old", "want"),
    [
        pytest.param(Old(state=READY), Step.BESIDE, id="one that serves: a new one beside it"),
        pytest.param(Old(state=READY, has_room=False), Step.AFTER, id="without a free slot, the new one after it"),
        pytest.param(Old(state=READY, failure=FAILURE), Step.BESIDE, id="a failure from before its turn"),
        pytest.param(Old(state=RELIEVED, begun=Step.BESIDE, coming=1), Step.WAIT, id="it serves until then"),
        pytest.param(
            Old(state=ReplicaState.DRAINING, begun=Step.BESIDE, has_come=True), Step.WAIT, id="it finishes what it has"
        ),
        pytest.param(Old(state=None, begun=Step.BESIDE, has_come=True), Step.OVER, id="it is gone, a new one serves"),
        pytest.param(Old(state=None, begun=Step.AFTER, coming=1), Step.WAIT, id="it is gone, the new one restores"),
        pytest.param(
            Old(state=None, begun=Step.AFTER, coming=1, failure=FAILURE),
            Step.WAIT,
            id="a start failed, another one is coming",
        ),
        pytest.param(
            Old(state=None, begun=Step.AFTER, failure=FAILURE), Step.FAILED, id="it is gone, and no other came"
        ),
        pytest.param(
            Old(state=None, begun=Step.AFTER, has_come=True, failure=FAILURE),
            Step.OVER,
            id="a failure beside one that came",
        ),
        pytest.param(Old(state=None, begun=Step.BESIDE), Step.OVER, id="it is gone, and fewer are wanted"),
        pytest.param(Old(state=None), Step.OVER, id="it went by itself before its turn"),
        pytest.param(
            Old(state=READY, begun=Step.BESIDE, failure=FAILURE), Step.FAILED, id="it counts again: none took its place"
        ),
        pytest.param(Old(state=READY, begun=Step.BESIDE), Step.FAILED, id="it counts again, and nobody knows why"),
        pytest.param(
            Old(state=READY, begun=Step.BESIDE, failure=LACKS_MEMORY), Step.AFTER, id="memory does not hold two"
        ),
        pytest.param(
            Old(state=READY, begun=Step.AFTER, failure=LACKS_MEMORY), Step.FAILED, id="memory does not hold one"
        ),
        pytest.param(Old(state=ReplicaState.RESTORING), Step.WAIT, id="it has to be ready to be replaced"),
        pytest.param(Old(state=ReplicaState.DOZING), Step.WAIT, id="it falls asleep"),
        pytest.param(Old(state=ReplicaState.ASLEEP), Step.END, id="it sleeps"),
        pytest.param(Old(state=ReplicaState.ASLEEP2), Step.END, id="it sleeps deeper"),
        pytest.param(Old(state=ReplicaState.ENDING), Step.WAIT, id="it ends already"),
    ],
)
def test_next_step(old: Old, want: Step) -> None:
    """One rule for each state that an order can meet. Only waiting has an end."""
    assert next_step(old, 10.0, 10.0) is want
    assert next_step(old, 10.1, 10.0) is (Step.LATE if want is Step.WAIT else want)


_DAMAGED = {
    Step.CONDEMN: {READY, RELIEVED, ReplicaState.DOZING, ReplicaState.DRAINING},
    Step.END: {ReplicaState.RESTORING, ReplicaState.ASLEEP, ReplicaState.ASLEEP2},
}


@pytest.mark.parametrize("state", ReplicaState)
def test_a_damaged_replica_never_goes_on(state: ReplicaState) -> None:
    """One that may say something is told so, one that serves nobody ends. Others have no version, or end already."""
    assert step_if_damaged(state) is next((step for step, states in _DAMAGED.items() if state in states), Step.WAIT)


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
def test_version_before_a_young_one(named: str, since_s: dict[str, float], want: dict[str, str]) -> None:
    """At second 1000, of versions with one letter each."""
    assert versions_before(frozenset(named), since_s, 1000.0, OVERLAP_S) == want


@pytest.mark.parametrize(("since_s", "want"), [({"a": 0.0}, {"b": "a"}), ({"a": 0.0, "b": 1000.0}, {})])
def test_no_overlap(since_s: dict[str, float], want: dict[str, str]) -> None:
    """Until its first replica, and no longer."""
    assert versions_before("b", since_s, 1000.0, 0.0) == want
