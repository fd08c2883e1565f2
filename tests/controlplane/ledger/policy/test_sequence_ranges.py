"""Ranges of received sequences, and the gaps between them."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.ledger.policy.sequence_ranges import Range, add_to_ranges, covers, gaps


@pytest.mark.parametrize(
    ("received", "want"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([(1, 5)], [], id="all of it"),
        pytest.param([(2, 5)], [(1, 1)], id="not the first"),
        pytest.param([(1, 2), (5, 6), (9, 9)], [(3, 4), (7, 8)], id="two gaps"),
    ],
)
def test_gaps(received: Sequence[Range], want: Sequence[Range]) -> None:
    """Gaps are the missing sequences before the last received one."""
    assert list(gaps(received)) == want


SEQUENCES = st.lists(st.integers(min_value=1, max_value=30), max_size=30)


@given(SEQUENCES, SEQUENCES)
def test_ranges_are_the_set_of_what_arrived(first: list[int], second: list[int]) -> None:
    """Two batches in any order, with repeats, give disjoint ascending ranges."""
    ranges = add_to_ranges(add_to_ranges([], first), second)
    assert [number for low, high in ranges for number in range(low, high + 1)] == sorted({*first, *second})
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(ranges))
    assert all(covers(ranges, number) == (number in {*first, *second}) for number in range(32))


@given(st.sets(st.integers(min_value=1, max_value=30), min_size=1))
def test_every_lost_record_is_in_a_gap(arrived: set[int]) -> None:
    """The gaps are exactly the missing sequences before the last received one."""
    lost = {number for low, high in gaps(add_to_ranges([], arrived)) for number in range(low, high + 1)}
    assert lost == set(range(1, max(arrived))) - arrived
