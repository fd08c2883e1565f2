"""How a replica's slots are divided between activators, and what one of them knows of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.slot_parts import SlotLease, Wish, part_of


def needed(slots: int) -> Wish:
    """All that is wanted is."""
    return Wish(0, slots, slots)


@pytest.mark.parametrize(
    ("slots", "wants", "want"),
    [
        pytest.param(8, [3], [3], id="alone: all that is wanted"),
        pytest.param(8, [30], [8], id="alone: all that there is"),
        pytest.param(8, [3, 5], [3, 5], id="enough for all"),
        pytest.param(8, [3, 6], [3, 5], id="who wants less than its part has all of it"),
        pytest.param(8, [9, 20], [4, 4], id="the rest by equal parts, however much more one wants"),
        pytest.param(9, [1, 20, 30], [1, 4, 4], id="what the least lacks goes to the others"),
        pytest.param(8, [0, 9], [0, 8], id="who wants none is not in the way"),
        pytest.param(0, [3, 3], [0, 0], id="there are none"),
    ],
)
def test_parts(slots: int, wants: list[int], want: list[int]) -> None:
    """The same in whichever turn, where they divide."""
    wishes = [needed(each) for each in wants]
    for turn in range(3):
        assert [part_of(slots, wishes, me, turn) for me in range(len(wants))] == want


@pytest.mark.parametrize(
    ("slots", "wishes", "want"),
    [
        pytest.param(8, [(1, 2), (1, 2), (1, 2), (8, 8)], [1, 1, 1, 5], id="what is needed comes before any ahead"),
        pytest.param(8, [(1, 2), (1, 2), (2, 3)], [2, 2, 3], id="enough for all that is wanted"),
        pytest.param(8, [(1, 9), (3, 4)], [4, 4], id="what is left by equal parts, as far as it is wanted"),
        pytest.param(4, [(8, 9), (1, 9)], [3, 1], id="nothing is left"),
    ],
)
def test_ahead_of_need(slots: int, wishes: list[tuple[int, int]], want: list[int]) -> None:
    """Of each what it needs and what it wants in all."""
    parts = [part_of(slots, [Wish(0, *wish) for wish in wishes], me, 0) for me in range(len(wishes))]
    assert parts == want


def test_what_does_not_divide_goes_round() -> None:
    """One slot for three has each of them in turn; two of five have the larger part."""
    assert [[part_of(1, list(map(needed, (1, 4, 1))), me, turn) for me in range(3)] for turn in range(3)] == [
        [1, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
    ]
    for turn in range(5):
        assert sorted(part_of(12, [needed(9)] * 5, me, turn) for me in range(5)) == [2, 2, 2, 3, 3]


@given(
    slots=st.integers(0, 20),
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=6),
    turn=st.integers(0, 10**9),
)
def test_all_is_given_and_never_more(slots: int, rows: list[tuple[int, int]], turn: int) -> None:
    """Nobody has more than it wants, nor any ahead where another lacks what it needs; and of two that lack some of
    what they need, neither has two more than the other.
    """
    wishes = [Wish(0, need, need + ahead) for need, ahead in rows]
    parts = [part_of(slots, wishes, me, turn) for me in range(len(wishes))]
    assert sum(parts) == min(slots, sum(wish.want for wish in wishes))
    assert all(0 <= part <= wish.want for part, wish in zip(parts, wishes, strict=True))
    lacking = [part for part, wish in zip(parts, wishes, strict=True) if part < wish.need]
    assert all(part <= least + 1 for least in lacking for part in parts)
    if lacking:
        assert all(part <= wish.need for part, wish in zip(parts, wishes, strict=True))


def test_what_is_asked_for() -> None:
    """What was used since, who waits, an eighth ahead; nothing where nobody came."""
    lease = SlotLease()
    assert lease.ask(0, 0, 64) == Wish(0, 0, 0)
    assert lease.ask(0, 1, 64) == Wish(0, 1, 9)
    lease.told(Wish(0, 1, 9), 9)
    lease.used(3)
    lease.used(2)
    assert lease.ask(1, 0, 64) == Wish(9, 3, 11), "what may be in use when the answer comes is kept"
    lease.told(Wish(9, 3, 11), 11)
    assert lease.ask(1, 100, 64) == Wish(11, 64, 64)
    lease.told(Wish(11, 64, 64), 40)
    assert lease.ask(1, 0, 64) == Wish(9, 1, 9), "what goes back is not used any more"
    assert lease.slots == 9


def test_a_part_that_is_cut_is_given_back_as_requests_end() -> None:
    """What is in use is kept; then the store is told, and what it knows is what there is."""
    lease = SlotLease()
    lease.told(lease.ask(0, 8, 8), 8)
    lease.used(8)
    assert not lease.gives_back(8)
    wish = lease.ask(8, 5, 8)
    lease.told(wish, 4)
    assert (lease.slots, lease.held) == (4, 8)
    assert not lease.gives_back(8), "all are in use"
    assert lease.gives_back(7)
    wish = lease.ask(7, 5, 8)
    assert wish == Wish(7, 8, 8)
    lease.told(wish, 4)
    assert not lease.gives_back(7)


def test_after_a_time_alone_it_asks_for_what_it_has() -> None:
    """And for more next time, when the others have said what they have."""
    lease = SlotLease(slots=4)
    lease.used(4)
    assert lease.stay(2) == Wish(4, 4, 4)
    lease.told(Wish(4, 4, 4), 3)
    assert (lease.slots, lease.held) == (3, 4)
    assert SlotLease(slots=1).stay(3) == Wish(3, 3, 3)


def test_it_is_idle_once_the_store_knows_so() -> None:
    """And not before: a slot that is held for nobody would be nobody's."""
    lease = SlotLease()
    assert lease.is_idle(0)
    lease.told(lease.ask(0, 1, 8), 2)
    assert not lease.is_idle(0)
    wish = lease.ask(0, 0, 8)
    assert wish == Wish(0, 0, 0)
    assert not lease.is_idle(0), "nobody has heard of it"
    lease.told(wish, 0)
    assert lease.is_idle(0)
    assert not lease.is_idle(1)
    lease.told(Wish(0, 1, 2), 0)
    assert not lease.is_idle(0), "others have less for a wish that is nobody's any more"
    lease.told(Wish(0, 5, 5), 5)
    assert lease.leave(2) == Wish(2, 0, 0)
    assert lease.slots == 0
