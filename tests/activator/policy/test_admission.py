"""Admit, hold or shed, as a table; first reason wins."""

import pytest

from activator.policy.admission import RETRY_AFTER_S, Admission, AdmissionFacts, Admit, Hold, QueueLimits, Shed, decide
from activator.policy.queue import Bound, Load
from contracts.deadline import Deadline
from contracts.errors import DeadlineExceeded, Overloaded

LIMITS = QueueLimits(Bound(2, 100), Bound(3, 150), 10.0)
OWN, ALL = "the queue of this model", "the queue"


@pytest.mark.parametrize(
    ("free", "own", "everyone", "deadline_s", "want"),
    [
        pytest.param(1, Load(), Load(), 5.0, Admit(), id="a free slot and nobody before"),
        pytest.param(1, Load(2, 100), Load(3, 150), 5.0, Shed(Overloaded(OWN, 2, RETRY_AFTER_S)), id="no overtaking"),
        pytest.param(0, Load(), Load(), 5.0, Hold(5.0), id="no slot: wait until the deadline"),
        pytest.param(0, Load(), Load(), 50.0, Hold(10.0), id="no slot: no longer than the queue allows"),
        pytest.param(0, Load(1, 90), Load(1, 90), 5.0, Hold(5.0), id="the last bytes that fit"),
        pytest.param(0, Load(1, 91), Load(1, 91), 5.0, Shed(Overloaded(OWN, 2, RETRY_AFTER_S)), id="one byte more"),
        pytest.param(0, Load(2, 0), Load(2, 0), 5.0, Shed(Overloaded(OWN, 2, RETRY_AFTER_S)), id="the third of two"),
        pytest.param(0, Load(), Load(3, 0), 5.0, Shed(Overloaded(ALL, 3, RETRY_AFTER_S)), id="all queues are full"),
        pytest.param(0, Load(), Load(0, 141), 5.0, Shed(Overloaded(ALL, 3, RETRY_AFTER_S)), id="all bytes are taken"),
        pytest.param(9, Load(), Load(), 0.0, Shed(DeadlineExceeded(0.0, "admitting")), id="too late already"),
    ],
)
def test_decide(free: int, own: Load, everyone: Load, deadline_s: float, want: Admission) -> None:
    """Ten bytes arrive at time 0."""
    facts = AdmissionFacts(free, 10, own, everyone, LIMITS, Deadline(deadline_s))
    assert decide(facts, 0.0) == want
