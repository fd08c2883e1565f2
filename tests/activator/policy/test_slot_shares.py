"""Slots of a version are reserved for its owner: at most its share, and never all of them."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.slot_shares import MANY, PAUSE_S, WINDOW_S, SlotShares


@dataclass(frozen=True)
class Owner:
    """Weight of the owner, slots that it has, and requests that it had at once."""

    weight: int = 1
    running: int = 0
    need: int = 1


def shares(owner: Owner | None, guests: int) -> SlotShares:
    """Shares of a version whose guests have so many slots. Without an owner it never sent a request."""
    made = SlotShares("o")
    if owner is not None:
        made.ask("o", owner.weight, owner.need - 1)
        for _ in range(owner.running):
            made.take("o")
    for number in range(guests):
        made.ask(f"g{number}", 1, 0)
        made.take(f"g{number}")
    made.check_integrity()
    return made


@pytest.mark.parametrize(
    ("owner", "guests", "weight", "slots", "free", "want"),
    [
        pytest.param(None, 15, 1, 16, 1, True, id="nothing is reserved for an owner that never asked"),
        pytest.param(None, 16, 1, 16, 0, False, id="no slot is free"),
        pytest.param(Owner(need=3), 5, 1, 8, 3, False, id="the owner gets as many as it needed"),
        pytest.param(Owner(need=3), 4, 1, 8, 4, True, id="and no more than that"),
        pytest.param(Owner(running=3, need=3), 4, 1, 8, 1, True, id="slots that it has count"),
        pytest.param(Owner(running=7, need=7), 0, 1, 8, 1, True, id="a slot beyond its share is open to a guest"),
        pytest.param(Owner(need=99), 3, 1, 8, 5, True, id="half of the slots is for guests"),
        pytest.param(Owner(need=99), 4, 1, 8, 4, False, id="and half is for the owner"),
        pytest.param(Owner(3, need=99), 1, 1, 8, 7, True, id="a heavy owner leaves a quarter"),
        pytest.param(Owner(3, need=99), 2, 1, 8, 6, False, id="and gets three quarters"),
        pytest.param(Owner(need=99), 5, 3, 8, 3, True, id="a heavy guest gets three quarters"),
        pytest.param(Owner(need=99), 6, 3, 8, 2, False, id="and leaves a quarter"),
        pytest.param(Owner(need=9), 6, 99, 8, 2, True, id="the share of a light owner is small"),
        pytest.param(Owner(need=9), 7, 99, 8, 1, False, id="but one slot at least"),
        pytest.param(Owner(99, need=9), 0, 1, 2, 2, True, id="guests have one slot at least"),
        pytest.param(Owner(need=9), 0, 1, 1, 1, True, id="also where there is one slot"),
        pytest.param(Owner(need=1), 5, 1, 16, 1, True, id="a guest may try a replica that was lost"),
        pytest.param(Owner(need=4), 9, 1, 8, 5, True, id="guests at a replica that drains do not count"),
        pytest.param(Owner(need=4), 9, 1, 8, 4, False, id="but the owner's share does"),
    ],
)
def test_guest_may_take_a_slot(
    owner: Owner | None, guests: int, weight: int, slots: int, free: int, want: bool
) -> None:
    """As the owner needs and weighs. The owner itself may have any free slot."""
    made = shares(owner, guests)
    assert made.may_take("g", weight, slots, free) is want
    assert made.may_take("o", 1, slots, free) is (free > 0)


def test_need_is_forgotten() -> None:
    """After two windows. Of many slots one stays reserved for PAUSE_S. What runs or waits still counts."""
    made = SlotShares("o")
    made.refresh(1000.0, 0)
    made.ask("o", 1, 3)
    for _ in range(MANY - 4):
        made.take("g")
    assert not made.may_take("g", 1, MANY, 4)
    made.refresh(1000.0 + WINDOW_S, 0)
    assert not made.may_take("g", 1, MANY, 4)
    made.refresh(1000.0 + 2 * WINDOW_S, 0)
    assert made.may_take("g", 1, MANY, 4)
    for _ in range(3):
        made.take("g")
    assert not made.may_take("g", 1, MANY, 1)
    assert made.may_take("g", 1, MANY - 1, 1)
    made.refresh(999.0 + WINDOW_S + PAUSE_S, 0)
    assert not made.may_take("g", 1, MANY, 1)
    made.refresh(1000.0 + 2 * WINDOW_S + PAUSE_S, 0)
    assert made.may_take("g", 1, MANY, 1)
    made.refresh(1000.0 + 3 * WINDOW_S + PAUSE_S, 1)
    assert not made.may_take("g", 1, MANY, 1)
    made.check_integrity()


def test_need_is_forgotten_after_hours_without_a_request() -> None:
    """Nothing happened meanwhile, so that no window began."""
    made = SlotShares("o")
    made.refresh(1000.0, 0)
    made.ask("o", 1, 3)
    for _ in range(MANY - 1):
        made.take("g")
    made.refresh(9000.0, 0)
    assert made.may_take("g", 1, MANY, 1)


def test_weight_of_the_owner_changes_shares() -> None:
    """The caller learns of it, as queued requests may get slots."""
    made = SlotShares("o")
    assert made.ask("o", 3, 9)
    assert not made.ask("o", 3, 9)
    assert not made.ask("g", 9, 9)
    assert made.ask("o", 1, 9)


OWNERS = st.none() | st.builds(Owner, st.integers(1, 1000), st.integers(0, 9), st.integers(9, 40))


@given(OWNERS, st.integers(0, 40), st.integers(1, 1000), st.integers(1, 40))
def test_slots_are_never_reserved_from_everybody(owner: Owner | None, guests: int, weight: int, slots: int) -> None:
    """A guest may have the first slot, and each one beyond what the owner needed. Guests that take all slots that they
    may have leave the owner its share, as far as that is free.
    """
    made = shares(owner, guests)
    running, need = (0, 0) if owner is None else (owner.running, owner.need)
    free = slots - running - guests
    if free <= 0:
        return
    if not guests or free > need - running:
        assert made.may_take("g", weight, slots, free)
    before = free
    while free and made.may_take("g", weight, slots, free):
        made.take("g")
        free -= 1
    share = 0 if owner is None else slots * owner.weight // (owner.weight + weight)
    assert running + free >= min(need, share, running + before)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "take", "give back", "refresh"]), st.sampled_from("ogh"), st.integers(1, 3)
    ),
    max_size=60,
)  # fmt: skip


@given(OPERATIONS)
def test_counts_hold_at_each_change(operations: list[tuple[str, str, int]]) -> None:
    """A tenant that takes a slot has asked for it, and asks again later."""
    made, now_s = SlotShares("o"), 0.0
    waiting, running = dict.fromkeys("ogh", 0), dict.fromkeys("ogh", 0)
    for what, tenant, weight in operations:
        if what == "ask":
            made.ask(tenant, weight, waiting[tenant])
            waiting[tenant] += 1
        elif what == "refresh":
            now_s += WINDOW_S / weight
            made.refresh(now_s, waiting["o"])
        elif what == "take" and waiting[tenant]:
            made.take(tenant)
            waiting[tenant] -= 1
            running[tenant] += 1
        elif what == "give back" and running[tenant]:
            made.give_back(tenant)
            running[tenant] -= 1
        made.check_integrity()
        assert (made.owner_running, made.guests_running) == (running["o"], running["g"] + running["h"])
