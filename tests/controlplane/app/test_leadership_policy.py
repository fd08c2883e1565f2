"""Who may lead: nobody's clock is believed but one's own, and nobody's word but the Lease."""

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
        pytest.param(None, 0.0, AcquireLease(), id="nobody ever had it"),
        pytest.param(ObservedLease(LeaseRecord("", 1.0, "", 0, "1"), 0.0), 0.1, AcquireLease(), id="it was given up"),
        pytest.param(ObservedLease(LeaseRecord("a", 15.0, "", 0, "1"), 0.0), 0.1, AcquireLease(), id="it is ours"),
        pytest.param(ObservedLease(B, 5.0), 19.9, AwaitHolder(20.0), id="another's, from when it was seen to change"),
        pytest.param(ObservedLease(B, 5.0), 20.0, AcquireLease(), id="another's, who is silent for its time"),
        pytest.param(
            ObservedLease(LeaseRecord("b", 60.0, "", 0, "1"), 5.0),
            20.0,
            AwaitHolder(65.0),
            id="its own time counts, not ours",
        ),
    ],
)
def test_decide(sight: ObservedLease | None, now: float, want: AcquireLease | AwaitHolder) -> None:
    """Candidate `a`."""
    assert decide(sight, "a", now) == want


@pytest.mark.parametrize(
    ("before", "held", "want"),
    [
        pytest.param(None, B, ObservedLease(B, 9.0), id="the first look begins its time, whenever it was renewed"),
        pytest.param(ObservedLease(B, 5.0), B, ObservedLease(B, 5.0), id="no change, no new time"),
        pytest.param(
            ObservedLease(B, 5.0),
            LeaseRecord("b", 15.0, "later", 0, "2"),
            ObservedLease(LeaseRecord("b", 15.0, "later", 0, "2"), 9.0),
            id="renewed",
        ),
        pytest.param(
            ObservedLease(B, 5.0), None, ObservedLease(B, 5.0), id="deleted: its holder may not know of it yet"
        ),
        pytest.param(None, None, None, id="nothing was and is there"),
    ],
)
def test_observe(before: ObservedLease | None, held: LeaseRecord | None, want: ObservedLease | None) -> None:
    """At second 9."""
    assert observe(before, held, now=9.0) == want


def test_leader_stops_before_the_lease_expires() -> None:
    """They wait from when they saw its renewal, which was not before it was begun."""
    begun = 100.0
    seen = ObservedLease(B, begun)
    assert decide(seen, "a", leads_until(begun, TERMS)) == AwaitHolder(begun + 15.0)


@pytest.mark.parametrize("terms", [(10, 15.0, 2.0), (15, 2.0, 10.0), (15, 10.0, 0.0), (15, 15.0, 2.0)])
def test_inconsistent_lease_durations_are_refused(terms: tuple[int, float, float]) -> None:
    """Two could lead, or nobody for long."""
    with pytest.raises(ValueError, match="less than the one before"):
        LeaseDurations(*terms)


def test_repeated_losses_delay_the_next_candidacy() -> None:
    """Twice as late each time, up to a minute; who has kept it for long begins anew."""
    losses, pauses = 0, []
    for led_s in (5.0, 60.0, 60.0, 5.0, 5.0, 5.0, 61.0):
        losses = losses_after(losses, led_s)
        pauses.append(pause_s(losses, TERMS, 0.0))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 2.0]
    assert pause_s(1000, TERMS, 0.99) == pytest.approx(30.3)


def test_lease_spec_when_acquired_renewed_and_released() -> None:
    """What the cluster keeps, as client-go writes it."""
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
    """Somebody made it by hand."""
    assert read({"metadata": {"resourceVersion": "7"}}, TERMS) == LeaseRecord("", 15.0, "", 0, "7")
