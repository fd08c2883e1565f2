"""Slots of a version are kept for tenants that use it: at most their shares, never so that nobody may have any."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.slot_shares import WINDOW_S, SlotShares


@dataclass(frozen=True)
class Uses:
    """A tenant by its name, with its weight, the slots that it has, and how many it needed at once."""

    tenant: str
    weight: int = 1
    running: int = 0
    need: int = 1


def shares(*uses: Uses) -> SlotShares:
    """Of a version whose owner is `o`."""
    made = SlotShares("o")
    for each in uses:
        made.ask(each.tenant, each.weight, each.need - 1)
        for _ in range(each.running):
            made.take(each.tenant)
    made.check_integrity()
    return made


@pytest.mark.parametrize(
    ("uses", "tenant", "slots", "free", "want"),
    [
        pytest.param((Uses("o", running=7, need=9),), "o", 8, 1, True, id="an owner without guests has all slots"),
        pytest.param((Uses("o", running=8, need=9),), "o", 8, 0, False, id="of none that is free nobody has one"),
        pytest.param((Uses("g", running=6, need=9),), "g", 8, 2, True, id="a guest has what its owner may not need"),
        pytest.param((Uses("g", running=15, need=19),), "g", 16, 1, False, id="the last slot is kept for the owner"),
        pytest.param((Uses("g", running=7, need=9), Uses("o")), "o", 8, 1, True, id="which takes it"),
        pytest.param((Uses("g", running=7, need=9),), "g", 8, 1, True, id="which is not kept where slots are few"),
        pytest.param((Uses("g", running=5, need=9), Uses("o", need=3)), "g", 8, 3, False, id="as many as it needed"),
        pytest.param((Uses("g", running=4, need=9), Uses("o", need=3)), "g", 8, 4, True, id="and no more than that"),
        pytest.param((Uses("g", running=3, need=9), Uses("o", need=99)), "g", 8, 5, True, id="half is the guest's"),
        pytest.param((Uses("g", running=4, need=9), Uses("o", need=99)), "g", 8, 4, False, id="and half the owner's"),
        pytest.param((Uses("g", running=2, need=9), Uses("o", 3, need=99)), "g", 8, 6, False, id="shares go by weight"),
        pytest.param((Uses("g", running=1, need=9), Uses("o", 3, need=99)), "g", 8, 7, True, id="a quarter is its"),
        pytest.param((Uses("g"), Uses("h", 99, 2, 9), Uses("o")), "g", 4, 1, True, id="a share is one slot at least"),
        pytest.param((Uses("g"), Uses("h", running=1), Uses("o", running=1)), "g", 2, 0, False, id="if one is free"),
        pytest.param((Uses("g"), Uses("h", running=1), Uses("o")), "g", 2, 1, True, id="of too many none is kept"),
        pytest.param((Uses("g"), Uses("h", need=9), Uses("o")), "g", 2, 2, True, id="nothing runs, nothing is kept"),
    ],
)
def test_who_may_take_a_slot(uses: tuple[Uses, ...], tenant: str, slots: int, free: int, want: bool) -> None:
    """By what each has, needed and weighs."""
    assert shares(*uses).may_take(tenant, slots, free) is want


def test_need_is_forgotten() -> None:
    """After two windows without it; what runs or waits counts on."""
    made = shares(Uses("o", need=4), Uses("g", running=9, need=9))
    made.refresh(1000.0, lambda tenant: 0)
    assert not made.may_take("g", 16, 4)
    made.refresh(1000.0 + WINDOW_S / 2, lambda tenant: 0)
    assert not made.may_take("g", 16, 4)
    made.refresh(1000.0 + WINDOW_S, lambda tenant: 0)
    assert made.may_take("g", 16, 2)
    assert not made.may_take("g", 16, 1), "the owner's one slot"
    assert made.may_take("g", 10, 1)
    made.check_integrity()


NAMES = "oabcdef"
SOME = st.lists(
    st.builds(Uses, st.sampled_from(NAMES), st.integers(1, 100), st.integers(0, 9), st.integers(1, 20)),
    min_size=1, max_size=len(NAMES), unique_by=lambda each: each.tenant,
)  # fmt: skip


@given(SOME, st.integers(1, 40), st.data())
def test_slots_are_never_kept_from_everybody(uses: list[Uses], slots: int, data: st.DataObject) -> None:
    """Where nothing runs each tenant may begin. Each tenant without a slot may have a free one where each has a share
    of one at least. As long as more is free than others are entitled to, anybody may.
    """
    running = sum(each.running for each in uses)
    made, free = shares(*uses), slots - running
    tenant = data.draw(st.sampled_from(uses))
    if free <= 0:
        assert not made.may_take(tenant.tenant, slots, free)
        return
    assert made.may_take(tenant.tenant, slots, slots)
    tenants = len({each.tenant for each in uses} | {"o"})
    if tenants <= slots and not tenant.running:
        assert made.may_take(tenant.tenant, slots, free)
    if free > sum(each.need for each in uses if each is not tenant) + 1:
        assert made.may_take(tenant.tenant, slots, free)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "take", "give back", "refresh", "may take"]),
        st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 20),
    ),
    max_size=60,
)  # fmt: skip


@given(OPERATIONS)
def test_what_is_kept_is_counted_at_each_change(operations: list[tuple[str, str, int, int]]) -> None:
    """`check_integrity` counts it anew."""
    made, now_s = SlotShares("o"), 0.0
    asked: set[str] = set()
    for what, tenant, weight, slots in operations:
        if what == "ask":
            made.ask(tenant, weight, slots)
            asked.add(tenant)
        elif what == "refresh":
            now_s += WINDOW_S
            made.refresh(now_s, lambda tenant: 0)
            asked &= {each for each in asked if made.running(each)}
        elif tenant in asked:
            if what == "take":
                made.take(tenant)
            elif what == "give back" and made.running(tenant):
                made.give_back(tenant)
            elif what == "may take":
                made.may_take(tenant, slots, min(slots, 3))
        made.check_integrity()
