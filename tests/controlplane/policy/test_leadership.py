"""Who may lead: nobody's clock is believed but one's own, and nobody's word but the Lease."""

import pytest

from controlplane.policy.leadership import (
    Held,
    Sight,
    Stand,
    Take,
    Terms,
    decide,
    given_up,
    leads_until,
    losses_after,
    observe,
    pause_s,
    read,
    written,
)

TERMS = Terms()
B = Held("b", 15.0, "2026-01-01T00:00:00.000000Z", 0, "1")


@pytest.mark.parametrize(
    ("sight", "now", "want"),
    [
        pytest.param(None, 0.0, Take(), id="nobody ever had it"),
        pytest.param(Sight(Held("", 1.0, "", 0, "1"), 0.0), 0.1, Take(), id="it was given up"),
        pytest.param(Sight(Held("a", 15.0, "", 0, "1"), 0.0), 0.1, Take(), id="it is ours"),
        pytest.param(Sight(B, 5.0), 19.9, Stand(20.0), id="another's, from when it was seen to change"),
        pytest.param(Sight(B, 5.0), 20.0, Take(), id="another's, who is silent for its time"),
        pytest.param(Sight(Held("b", 60.0, "", 0, "1"), 5.0), 20.0, Stand(65.0), id="its own time counts, not ours"),
    ],
)
def test_decide(sight: Sight | None, now: float, want: Take | Stand) -> None:
    """Candidate `a`."""
    assert decide(sight, "a", now) == want


@pytest.mark.parametrize(
    ("before", "held", "want"),
    [
        pytest.param(None, B, Sight(B, 9.0), id="the first look begins its time, whenever it was renewed"),
        pytest.param(Sight(B, 5.0), B, Sight(B, 5.0), id="no change, no new time"),
        pytest.param(
            Sight(B, 5.0), Held("b", 15.0, "later", 0, "2"), Sight(Held("b", 15.0, "later", 0, "2"), 9.0), id="renewed"
        ),
        pytest.param(Sight(B, 5.0), None, Sight(B, 5.0), id="deleted: its holder may not know of it yet"),
        pytest.param(None, None, None, id="nothing was and is there"),
    ],
)
def test_observe(before: Sight | None, held: Held | None, want: Sight | None) -> None:
    """At second 9."""
    assert observe(before, held, now=9.0) == want


def test_a_leader_stops_before_others_begin() -> None:
    """They wait from when they saw its renewal, which was not before it was begun."""
    begun = 100.0
    seen = Sight(B, begun)
    assert decide(seen, "a", leads_until(begun, TERMS)) == Stand(begun + 15.0)


@pytest.mark.parametrize("terms", [(10, 15.0, 2.0), (15, 2.0, 10.0), (15, 10.0, 0.0), (15, 15.0, 2.0)])
def test_terms_that_are_none(terms: tuple[int, float, float]) -> None:
    """Two could lead, or nobody for long."""
    with pytest.raises(ValueError, match="less than the one before"):
        Terms(*terms)


def test_who_loses_it_soon_stands_again_later() -> None:
    """Twice as late each time, up to a minute; who has kept it for long begins anew."""
    losses, pauses = 0, []
    for led_s in (5.0, 60.0, 60.0, 5.0, 5.0, 5.0, 61.0):
        losses = losses_after(losses, led_s)
        pauses.append(pause_s(losses, TERMS, 0.0))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 2.0]
    assert pause_s(1000, TERMS, 0.99) == pytest.approx(30.3)


def test_taken_renewed_given_up() -> None:
    """What the cluster keeps, as client-go writes it."""
    first = written(None, "a", "t0", TERMS)
    assert first == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "t0",
        "renewTime": "t0",
        "leaseTransitions": 0,
    }
    renewed = written(first, "a", "t1", TERMS)
    assert renewed == {**first, "renewTime": "t1"}
    left = given_up(renewed, "t2")
    assert left == {**renewed, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": "t2"}
    taken = written(left, "b", "t3", TERMS)
    assert taken == {**first, "holderIdentity": "b", "acquireTime": "t3", "renewTime": "t3", "leaseTransitions": 1}


def test_a_lease_that_says_little() -> None:
    """Somebody made it by hand."""
    assert read({"metadata": {"resourceVersion": "7"}}, TERMS) == Held("", 15.0, "", 0, "7")
