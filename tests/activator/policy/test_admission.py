"""Admit, hold or shed, as a table; first reason wins."""

import pytest

from activator.policy.admission import (
    RETRY_AFTER_S,
    Admission,
    AdmissionFacts,
    Admit,
    Hold,
    QueueLimits,
    Shed,
    decide,
)
from activator.policy.ask import Ask
from activator.policy.bounds import Bound, Load, Loads
from contracts.deadline import Deadline
from contracts.traffic_errors import DeadlineExceeded, Overloaded

LIMITS = QueueLimits(Bound(2, 100, 1000), Bound(3, 150, 1500), Bound(4, 200, 2000), 10.0)
MINE, OURS, ALL = "the queue of this model", "the queue of your tenant", "the queue"


def full(queue: str, unit: str, limit: int) -> Hold:
    return Hold(5.0, Overloaded(queue, limit, RETRY_AFTER_S, unit))


def shared(tenant: str, load: Load) -> Loads:
    return Loads(load, {tenant: load})


@pytest.mark.parametrize(
    ("has_slot", "own", "loads", "deadline_s", "want"),
    [
        pytest.param(True, Load(), Loads(), 5.0, Admit(), id="a free slot and nobody before"),
        pytest.param(True, Load(), shared("u", Load(4, 200, 2000)), 5.0, Admit(), id="who needs no place"),
        pytest.param(True, Load(2, 100), Loads(), 5.0, Admit(), id="who waits may not have this slot"),
        pytest.param(False, Load(), Loads(), 5.0, Hold(5.0), id="no slot: wait until the deadline"),
        pytest.param(False, Load(), Loads(), 50.0, Hold(10.0), id="no slot: no longer than the queue allows"),
        pytest.param(False, Load(1, 90, 900), Loads(), 5.0, Hold(5.0), id="the last bytes and tokens that fit"),
        pytest.param(False, Load(1, 91, 900), Loads(), 5.0, full(MINE, "bytes", 100), id="one byte more"),
        pytest.param(False, Load(1, 90, 901), Loads(), 5.0, full(MINE, "tokens", 1000), id="one token more"),
        pytest.param(False, Load(2), Loads(), 5.0, full(MINE, "requests", 2), id="the third of two"),
        pytest.param(False, Load(), shared("t", Load(3)), 5.0, full(OURS, "requests", 3), id="a fourth of three"),
        pytest.param(False, Load(), shared("t", Load(1, 141)), 5.0, full(OURS, "bytes", 150), id="a tenant's bytes"),
        pytest.param(False, Load(), shared("t", Load(1, 0, 1401)), 5.0, full(OURS, "tokens", 1500), id="its tokens"),
        pytest.param(False, Load(), shared("u", Load(3, 190, 1900)), 5.0, Hold(5.0), id="another tenant's"),
        pytest.param(False, Load(), shared("u", Load(4)), 5.0, full(ALL, "requests", 4), id="all queues are full"),
        pytest.param(False, Load(), shared("u", Load(1, 191)), 5.0, full(ALL, "bytes", 200), id="all bytes are taken"),
        pytest.param(False, Load(), shared("u", Load(1, 0, 1901)), 5.0, full(ALL, "tokens", 2000), id="all tokens are"),
        pytest.param(True, Load(), Loads(), 0.0, Shed(DeadlineExceeded(0.0, "admitting")), id="too late already"),
    ],
)
def test_decide(has_slot: bool, own: Load, loads: Loads, deadline_s: float, want: Admission) -> None:
    """Ten bytes and a hundred tokens of tenant t arrive at time 0."""
    facts = AdmissionFacts(has_slot, Ask("t", 10, 100), own, loads, LIMITS, Deadline(deadline_s))
    assert decide(facts, 0.0) == want
