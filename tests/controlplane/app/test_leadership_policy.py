"""The leadership policy trusts no clock but its own, and no source but the Lease."""

import pytest

from controlplane.app.leadership_policy import (
    AcquireLease,
    AwaitHolder,
    LeaseDurations,
    LeaseRecord,
    ObservedLease,
    acquired_spec,
    decide,
    leads_until,
    losses_after,
    observe,
    pause_s,
    read,
    released_spec,
)

TERMS = LeaseDurations()
B = LeaseRecord("b", 15.0, "2026-01-01T00:00:00.000000Z", 0, "1")


@pytest.mark.parametrize(
    ("sight", "now", "want"),
    [
        pytest.param(None, 0.0, AcquireLease(), id="the Lease does not exist"),
        pytest.param(
            ObservedLease(LeaseRecord("", 1.0, "", 0, "1"), 0.0), 0.1, AcquireLease(), id="the Lease was released"
        ),
        pytest.param(
            ObservedLease(LeaseRecord("a", 15.0, "", 0, "1"), 0.0), 0.1, AcquireLease(), id="the Lease is our own"
        ),
        pytest.param(
            ObservedLease(B, 5.0), 19.9, AwaitHolder(20.0), id="another's Lease: wait from its last observed change"
        ),
        pytest.param(ObservedLease(B, 5.0), 20.0, AcquireLease(), id="another's Lease that was not renewed in time"),
        pytest.param(
            ObservedLease(LeaseRecord("b", 60.0, "", 0, "1"), 5.0),
            20.0,
            AwaitHolder(65.0),
            id="the duration in the Lease counts, not ours",
        ),
    ],
)
def test_decide(sight: ObservedLease | None, now: float, want: AcquireLease | AwaitHolder) -> None:
    assert decide(sight, "a", now) == want


@pytest.mark.parametrize(
    ("before", "held", "want"),
    [
        pytest.param(None, B, ObservedLease(B, 9.0), id="the first observation starts its time"),
        pytest.param(ObservedLease(B, 5.0), B, ObservedLease(B, 5.0), id="no change keeps the time"),
        pytest.param(
            ObservedLease(B, 5.0),
            LeaseRecord("b", 15.0, "later", 0, "2"),
            ObservedLease(LeaseRecord("b", 15.0, "later", 0, "2"), 9.0),
            id="a renewal restarts the time",
        ),
        pytest.param(ObservedLease(B, 5.0), None, ObservedLease(B, 5.0), id="deleted: its holder may not know yet"),
        pytest.param(None, None, None, id="no Lease before and now"),
    ],
)
def test_observe(before: ObservedLease | None, held: LeaseRecord | None, want: ObservedLease | None) -> None:
    assert observe(before, held, now=9.0) == want


def test_leader_stops_before_the_lease_expires() -> None:
    """Another candidate waits from when it saw the renewal, which is never before the renewal began."""
    begun = 100.0
    seen = ObservedLease(B, begun)
    assert decide(seen, "a", leads_until(begun, TERMS)) == AwaitHolder(begun + 15.0)


@pytest.mark.parametrize("durations", [(10, 15.0, 2.0), (15, 2.0, 10.0), (15, 10.0, 0.0), (15, 15.0, 2.0)])
def test_inconsistent_lease_durations_are_refused(durations: tuple[int, float, float]) -> None:
    """With such durations two could lead, or none for long."""
    with pytest.raises(ValueError, match="less than the one before"):
        LeaseDurations(*durations)


def test_repeated_losses_delay_the_next_candidacy() -> None:
    """The pause doubles with each loss, up to a minute. A term of more than a minute resets it."""
    losses, pauses = 0, []
    for led_s in (5.0, 60.0, 60.0, 5.0, 5.0, 5.0, 61.0):
        losses = losses_after(losses, led_s)
        pauses.append(pause_s(losses, TERMS, 0.0))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 2.0]
    assert pause_s(1000, TERMS, 0.99) == pytest.approx(30.3)


def test_lease_spec_when_acquired_renewed_and_released() -> None:
    """The Lease has the fields that client-go writes."""
    first = acquired_spec(None, "a", "t0", TERMS)
    assert first == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "t0",
        "renewTime": "t0",
        "leaseTransitions": 0,
    }
    renewed = acquired_spec(first, "a", "t1", TERMS)
    assert renewed == {**first, "renewTime": "t1"}
    left = released_spec(renewed, "t2")
    assert left == {**renewed, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "t2"}
    taken = acquired_spec(left, "b", "t3", TERMS)
    assert taken == {**first, "holderIdentity": "b", "acquireTime": "t3", "renewTime": "t3", "leaseTransitions": 1}


def test_incomplete_lease_uses_defaults() -> None:
    """A person may have created the Lease."""
    assert read({"metadata": {"resourceVersion": "7"}}, TERMS) == LeaseRecord("", 15.0, "", 0, "7")
