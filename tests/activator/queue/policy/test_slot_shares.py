"""Slots of a version are reserved for its owner: at most its share, and never all of them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.queue.policy.slot_shares import MANY_SLOTS, PAUSE_S, WINDOW_S, SlotShares


@dataclass(frozen=True)
class Owner:
    """The owner's weight, its running requests, and its peak of concurrent requests."""

    weight: int = 1
    running: int = 0
    need: int = 1


def shares(owner: Owner | None) -> SlotShares:
    """Return the shares of a version. None: its owner never sent a request."""
    made = SlotShares("o")
    if owner is not None:
        made.record_request("o", owner.weight, owner.need - 1)
        made.owner_running = owner.running
    made.check_integrity()
    return made


@pytest.mark.parametrize(
    ("owner", "guests", "weight", "slots", "free", "want"),
    [
        pytest.param(None, 15, 1, 16, 1, True, id="nothing is reserved for an owner that never asked"),
        pytest.param(None, 16, 1, 16, 0, False, id="no slot is free"),
        pytest.param(Owner(need=3), 5, 1, 8, 3, False, id="the owner gets as many as it needed"),
        pytest.param(Owner(need=3), 4, 1, 8, 4, True, id="the owner gets no more than it needed"),
        pytest.param(Owner(running=3, need=3), 4, 1, 8, 1, True, id="slots that it has count"),
        pytest.param(Owner(running=7, need=7), 0, 1, 8, 1, True, id="a slot beyond its share is open to a guest"),
        pytest.param(Owner(need=99), 3, 1, 8, 5, True, id="half of the slots is for guests"),
        pytest.param(Owner(need=99), 4, 1, 8, 4, False, id="half of the slots is for the owner"),
        pytest.param(Owner(3, need=99), 1, 1, 8, 7, True, id="a heavy owner leaves a quarter"),
        pytest.param(Owner(3, need=99), 2, 1, 8, 6, False, id="a heavy owner gets three quarters"),
        pytest.param(Owner(need=99), 5, 3, 8, 3, True, id="a heavy guest gets three quarters"),
        pytest.param(Owner(need=99), 6, 3, 8, 2, False, id="a heavy guest leaves a quarter"),
        pytest.param(Owner(need=9), 6, 99, 8, 2, True, id="the share of a light owner is small"),
        pytest.param(Owner(need=9), 7, 99, 8, 1, False, id="a light owner has one slot at least"),
        pytest.param(Owner(99, need=9), 0, 1, 2, 2, True, id="guests have one slot at least"),
        pytest.param(Owner(need=9), 0, 1, 1, 1, True, id="a guest may take the only slot"),
        pytest.param(Owner(need=1), 5, 1, 16, 1, True, id="a guest may try a replica that was lost"),
        pytest.param(Owner(need=4), 9, 1, 8, 5, True, id="guests at a replica that drains do not count"),
        pytest.param(Owner(need=4), 9, 1, 8, 4, False, id="the owner's share still counts"),
    ],
)
def test_guest_may_take_a_slot(
    owner: Owner | None, guests: int, weight: int, slots: int, free: int, want: bool
) -> None:
    """It depends on the owner's need and weight. The owner itself may take any free slot."""
    made = shares(owner)
    running = made.owner_running + guests
    assert made.may_take("g", weight, slots, free, running) is want
    assert made.may_take("o", 1, slots, free, running) is (free > 0)


def test_need_is_forgotten() -> None:
    """Need is forgotten after two windows. Of many slots one stays reserved for PAUSE_S. Running and waiting requests
    still count.
    """
    made = SlotShares("o")
    made.refresh(1000.0, 0)
    made.record_request("o", 1, 3)
    assert not made.may_take("g", 1, MANY_SLOTS, 4, MANY_SLOTS - 4)
    made.refresh(1000.0 + WINDOW_S, 0)
    assert not made.may_take("g", 1, MANY_SLOTS, 4, MANY_SLOTS - 4)
    made.refresh(1000.0 + 2 * WINDOW_S, 0)
    assert made.may_take("g", 1, MANY_SLOTS, 4, MANY_SLOTS - 4)
    assert not made.may_take("g", 1, MANY_SLOTS, 1, MANY_SLOTS - 1)
    assert made.may_take("g", 1, MANY_SLOTS - 1, 1, MANY_SLOTS - 1)
    made.refresh(999.0 + WINDOW_S + PAUSE_S, 0)
    assert not made.may_take("g", 1, MANY_SLOTS, 1, MANY_SLOTS - 1)
    made.refresh(1000.0 + 2 * WINDOW_S + PAUSE_S, 0)
    assert made.may_take("g", 1, MANY_SLOTS, 1, MANY_SLOTS - 1)
    made.refresh(1000.0 + 3 * WINDOW_S + PAUSE_S, 1)
    assert not made.may_take("g", 1, MANY_SLOTS, 1, MANY_SLOTS - 1)
    made.check_integrity()


def test_need_is_forgotten_after_hours_without_a_request() -> None:
    """No event began a new window meanwhile."""
    made = SlotShares("o")
    made.refresh(1000.0, 0)
    made.record_request("o", 1, 3)
    made.refresh(9000.0, 0)
    assert made.may_take("g", 1, MANY_SLOTS, 1, MANY_SLOTS - 1)


def test_weight_of_the_owner_changes_shares() -> None:
    """The return value tells the caller, since queued requests may get slots."""
    made = SlotShares("o")
    assert made.record_request("o", 3, 9)
    assert not made.record_request("o", 3, 9)
    assert not made.record_request("g", 9, 9)
    assert made.record_request("o", 1, 9)


OWNERS = st.none() | st.builds(Owner, st.integers(1, 1000), st.integers(0, 9), st.integers(9, 40))


@given(OWNERS, st.integers(0, 40), st.integers(1, 1000), st.integers(1, 40))
def test_slots_are_never_reserved_from_everybody(owner: Owner | None, guests: int, weight: int, slots: int) -> None:
    """A guest may take the first slot, and each slot beyond the owner's need. Guests that take all they may leave the
    owner its share, if it is free.
    """
    made = shares(owner)
    running, need = (0, 0) if owner is None else (owner.running, owner.need)
    free = slots - running - guests
    if free <= 0:
        return
    if not guests or free > need - running:
        assert made.may_take("g", weight, slots, free, slots - free)
    before = free
    while free and made.may_take("g", weight, slots, free, slots - free):
        free -= 1
    share = 0 if owner is None else slots * owner.weight // (owner.weight + weight)
    assert running + free >= min(need, share, running + before)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "take", "give back", "refresh"]), st.integers(1, 3)), max_size=60
)


@given(OPERATIONS)
def test_need_is_no_less_than_what_runs(operations: list[tuple[str, int]]) -> None:
    """The owner sends a request for each slot that it takes."""
    made, now_s, waiting = SlotShares("o"), 0.0, 0
    for what, weight in operations:
        if what == "ask":
            made.record_request("o", weight, waiting)
            waiting += 1
        elif what == "refresh":
            now_s += WINDOW_S / weight
            made.refresh(now_s, waiting)
        elif what == "take" and waiting:
            made.owner_running += 1
            waiting -= 1
        elif what == "give back" and made.owner_running:
            made.owner_running -= 1
        made.check_integrity()
