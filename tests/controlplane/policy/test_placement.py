"""Where a version goes, and what a pool's autoscaler is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.placement import PoolSpec, Sharing, Spot, choose, pool_for, reported

SMALL, LARGE = PoolSpec("small", 10, 2, 8), PoolSpec("large", 100, 1, 3)


@pytest.mark.parametrize(
    ("weight_bytes", "spots", "want"),
    [
        pytest.param(5, [], None, id="nobody waits"),
        pytest.param(11, [Spot("a", 10, 0)], None, id="none has room"),
        pytest.param(10, [Spot("a", 10, 0)], "a", id="to the byte"),
        pytest.param(5, [Spot("a", 100, 0), Spot("b", 10, 9)], "b", id="the smallest that has room"),
        pytest.param(5, [Spot("a", 10, 9), Spot("b", 10, 3)], "b", id="of equals the one that waits for longest"),
        pytest.param(50, [Spot("a", 100, 0), Spot("b", 10, 9)], "a", id="the large one where it has to be"),
    ],
)
def test_choose(weight_bytes: int, spots: list[Spot], want: str | None) -> None:
    found = choose(weight_bytes, spots)
    assert (None if found is None else found.pod) == want


@given(st.lists(st.integers(0, 50), max_size=6), st.lists(st.integers(0, 50), max_size=8).map(sorted))
def test_nothing_that_could_be_placed_is_left(sizes: list[int], rooms: list[int]) -> None:
    """Best fit in rising order of size places as many as any choice can.
    What is placed has room, and no pod is given twice.
    """
    waiting = [Spot(str(number), room, number) for number, room in enumerate(rooms)]
    placed = 0
    for size in sorted(sizes):
        spot = choose(size, waiting)
        if spot is not None:
            assert spot.weight_bytes >= size
            waiting.remove(spot)
            placed += 1
    assert placed == _most(sorted(sizes), rooms)


def _most(sizes: list[int], rooms: list[int]) -> int:
    """By trying how many of the smallest fit the largest rooms."""
    for count in range(len(sizes), 0, -1):
        largest = rooms[len(rooms) - count :] if count <= len(rooms) else []
        if len(largest) == count and all(size <= room for size, room in zip(sizes[:count], largest, strict=True)):
            return count
    return 0


@pytest.mark.parametrize(
    ("weight_bytes", "want"),
    [
        pytest.param(10, "small", id="fits both"),
        pytest.param(11, "large", id="fits one"),
        pytest.param(101, None, id="fits none: a Service of its own"),
    ],
)
def test_pool_for(weight_bytes: int, want: str | None) -> None:
    found = pool_for(weight_bytes, (LARGE, SMALL))
    assert (None if found is None else found.name) == want


def test_reported() -> None:
    """One a pod that is taken, one a start that waits, and the buffer; never more than there may be."""
    assert reported((SMALL, LARGE), {}, {}) == {"small": 2, "large": 1}
    assert reported((SMALL, LARGE), {"small": 3}, {"small": 1, "large": 1}) == {"small": 6, "large": 2}
    assert reported((LARGE,), {"large": 3}, {"large": 9}) == {"large": 3}


@pytest.mark.parametrize(
    ("sharing", "want"),
    [
        pytest.param(Sharing(), False, id="nobody's, where nothing is said"),
        pytest.param(Sharing(("*/*",)), True, id="everybody's"),
        pytest.param(Sharing(("acme/*",)), True, id="all of a tenant"),
        pytest.param(Sharing(("other/*", "acme/llama")), True, id="one of them"),
        pytest.param(Sharing(("*/other", "other/llama")), False, id="others"),
        pytest.param(Sharing(("*/*", "acme/llama"), frozenset({"acme"})), False, id="never of one that is apart"),
    ],
)
def test_sharing(sharing: Sharing, want: bool) -> None:
    assert sharing.takes("acme", "llama") is want
