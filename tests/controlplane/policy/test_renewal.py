"""What is due next for a replica that is to be replaced."""

import pytest

from controlplane.policy.renewal import Due, Step, step
from controlplane.policy.replica_life import ReplicaState


@pytest.mark.parametrize(
    ("due", "want"),
    [
        pytest.param(Due(ReplicaState.READY, relieved=False), Step.RELIEVE, id="one that serves is relieved"),
        pytest.param(Due(ReplicaState.RELIEVED, relieved=True, coming=1), Step.WAIT, id="it serves until then"),
        pytest.param(Due(ReplicaState.DRAINING, relieved=True, came=True), Step.WAIT, id="it may finish what it has"),
        pytest.param(Due(None, relieved=True, came=True), Step.OVER, id="it is gone, and a new one serves"),
        pytest.param(Due(None, relieved=True, coming=1), Step.WAIT, id="it is gone, and the new one restores"),
        pytest.param(
            Due(None, relieved=True, coming=1, has_failed=True), Step.WAIT, id="a start failed, another one is coming"
        ),
        pytest.param(Due(None, relieved=True, has_failed=True), Step.FAILED, id="it is gone, and no other came"),
        pytest.param(
            Due(None, relieved=True, came=True, has_failed=True), Step.OVER, id="a failure beside one that came"
        ),
        pytest.param(Due(None, relieved=True), Step.OVER, id="it is gone, and fewer are wanted"),
        pytest.param(Due(None, relieved=False), Step.OVER, id="it went by itself before its turn"),
        pytest.param(Due(ReplicaState.READY, relieved=True), Step.FAILED, id="it counts again: none took its place"),
        pytest.param(Due(ReplicaState.RESTORING, relieved=False), Step.WAIT, id="it has to be ready to be relieved"),
        pytest.param(Due(ReplicaState.DOZING, relieved=False), Step.WAIT, id="it falls asleep"),
        pytest.param(Due(ReplicaState.ASLEEP, relieved=False), Step.END, id="it sleeps"),
        pytest.param(Due(ReplicaState.ASLEEP2, relieved=False), Step.END, id="it sleeps deeper"),
        pytest.param(Due(ReplicaState.ENDING, relieved=False), Step.WAIT, id="it ends already"),
    ],
)
def test_step(due: Due, want: Step) -> None:
    """One rule for each state that an order can meet."""
    assert step(due) is want
