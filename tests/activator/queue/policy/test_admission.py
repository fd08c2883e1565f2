"""The admission decision: admit, hold or shed, by the first reason that applies."""

import pytest

from activator.queue.policy.admission import (
    RETRY_AFTER_S,
    Admission,
    AdmissionFacts,
    Admit,
    Hold,
    QueueLimits,
    Shed,
    decide,
)
from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage, QueueUsageByTenant
from activator.queue.policy.queued_request import QueuedRequest
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded

LIMITS = QueueLimits(QueueLimit(2, 100, 1000), QueueLimit(3, 150, 1500), QueueLimit(4, 200, 2000), 10.0)
MINE, OURS, ALL = "the queue of this model", "the queue of your tenant", "the queue"


def full(queue: str, unit: str, limit: int) -> Hold:
    return Hold(5.0, Overloaded(queue, limit, RETRY_AFTER_S, unit))


def shared(tenant: str, load: QueueUsage) -> QueueUsageByTenant:
    return QueueUsageByTenant(load, {tenant: load})


@pytest.mark.parametrize(
    ("has_slot", "own", "loads", "deadline_s", "want"),
    [
        pytest.param(True, QueueUsage(), QueueUsageByTenant(), 5.0, Admit(), id="a free slot and an empty queue"),
        pytest.param(
            True, QueueUsage(), shared("u", QueueUsage(4, 200, 2000)), 5.0, Admit(), id="full queues and a free slot"
        ),
        pytest.param(
            True,
            QueueUsage(2, 100),
            QueueUsageByTenant(),
            5.0,
            Admit(),
            id="a full queue whose requests may not use the slot",
        ),
        pytest.param(False, QueueUsage(), QueueUsageByTenant(), 5.0, Hold(5.0), id="no slot: wait until the deadline"),
        pytest.param(
            False, QueueUsage(), QueueUsageByTenant(), 50.0, Hold(10.0), id="no slot: no longer than the queue allows"
        ),
        pytest.param(
            False, QueueUsage(1, 90, 900), QueueUsageByTenant(), 5.0, Hold(5.0), id="the last bytes and tokens that fit"
        ),
        pytest.param(
            False, QueueUsage(1, 91, 900), QueueUsageByTenant(), 5.0, full(MINE, "bytes", 100), id="one byte more"
        ),
        pytest.param(
            False, QueueUsage(1, 90, 901), QueueUsageByTenant(), 5.0, full(MINE, "tokens", 1000), id="one token more"
        ),
        pytest.param(False, QueueUsage(2), QueueUsageByTenant(), 5.0, full(MINE, "requests", 2), id="one request more"),
        pytest.param(
            False, QueueUsage(), shared("t", QueueUsage(3)), 5.0, full(OURS, "requests", 3), id="a tenant's requests"
        ),
        pytest.param(
            False, QueueUsage(), shared("t", QueueUsage(1, 141)), 5.0, full(OURS, "bytes", 150), id="a tenant's bytes"
        ),
        pytest.param(
            False,
            QueueUsage(),
            shared("t", QueueUsage(1, 0, 1401)),
            5.0,
            full(OURS, "tokens", 1500),
            id="a tenant's tokens",
        ),
        pytest.param(False, QueueUsage(), shared("u", QueueUsage(3, 190, 1900)), 5.0, Hold(5.0), id="another tenant's"),
        pytest.param(
            False, QueueUsage(), shared("u", QueueUsage(4)), 5.0, full(ALL, "requests", 4), id="all queues are full"
        ),
        pytest.param(
            False, QueueUsage(), shared("u", QueueUsage(1, 191)), 5.0, full(ALL, "bytes", 200), id="all bytes are taken"
        ),
        pytest.param(
            False,
            QueueUsage(),
            shared("u", QueueUsage(1, 0, 1901)),
            5.0,
            full(ALL, "tokens", 2000),
            id="all tokens are taken",
        ),
        pytest.param(
            True,
            QueueUsage(),
            QueueUsageByTenant(),
            0.0,
            Shed(DeadlineExceeded(0.0, "admitting")),
            id="the deadline has passed",
        ),
    ],
)
def test_admission_decides_by_first_reason_that_applies(
    has_slot: bool, own: QueueUsage, loads: QueueUsageByTenant, deadline_s: float, want: Admission
) -> None:
    """A request of ten bytes and a hundred tokens of tenant t arrives at time 0."""
    facts = AdmissionFacts(has_slot, QueuedRequest("t", 10, 100), own, loads, LIMITS, Deadline(deadline_s))
    assert decide(facts, 0.0) == want
