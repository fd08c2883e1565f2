"""Where a version goes, and what a pool's autoscaler is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.knative.policy.pod_placement import (
    FreePod,
    PoolingRule,
    PoolSpec,
    choose_pod,
    pool_concurrency,
    pool_for,
)

SMALL, LARGE = PoolSpec("small", 10, 2, 8), PoolSpec("large", 100, 1, 3)


@pytest.mark.parametrize(
    ("weight_bytes", "spots", "want"),
    [
        pytest.param(5, [], None, id="nobody waits"),
        pytest.param(11, [FreePod("a", 10, 0)], None, id="none has room"),
        pytest.param(10, [FreePod("a", 10, 0)], "a", id="to the byte"),
        pytest.param(5, [FreePod("a", 100, 0), FreePod("b", 10, 9)], "b", id="the smallest that has room"),
        pytest.param(5, [FreePod("a", 10, 9), FreePod("b", 10, 3)], "b", id="of equals the one that waits for longest"),
        pytest.param(50, [FreePod("a", 100, 0), FreePod("b", 10, 9)], "a", id="the large one where it has to be"),
    ],
)
def test_choose(weight_bytes: int, spots: list[FreePod], want: str | None) -> None:
    found = choose_pod(weight_bytes, spots)
    assert (None if found is None else found.pod) == want


@given(st.lists(st.integers(0, 50), max_size=6), st.lists(st.integers(0, 50), max_size=8).map(sorted))
def test_best_fit_places_as_many_as_possible(sizes: list[int], rooms: list[int]) -> None:
    """Best fit in rising order of size places as many as any choice can.
    What is placed has room, and no pod is given twice.
    """
    waiting = [FreePod(str(number), room, number) for number, room in enumerate(rooms)]
    placed = 0
    for size in sorted(sizes):
        spot = choose_pod(size, waiting)
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


def test_pool_concurrency_counts_taken_waiting_and_buffer() -> None:
    """One a pod that is taken, one a start that waits, and the buffer; never more than there may be."""
    assert pool_concurrency((SMALL, LARGE), {}, {}) == {"small": 2, "large": 1}
    assert pool_concurrency((SMALL, LARGE), {"small": 3}, {"small": 1, "large": 1}) == {"small": 6, "large": 2}
    assert pool_concurrency((LARGE,), {"large": 3}, {"large": 9}) == {"large": 3}


@pytest.mark.parametrize(
    ("sharing", "want"),
    [
        pytest.param(PoolingRule(), False, id="nobody's, where nothing is said"),
        pytest.param(PoolingRule(("*/*",)), True, id="everybody's"),
        pytest.param(PoolingRule(("acme/*",)), True, id="all of a tenant"),
        pytest.param(PoolingRule(("other/*", "acme/llama")), True, id="one of them"),
        pytest.param(PoolingRule(("*/other", "other/llama")), False, id="others"),
        pytest.param(PoolingRule(("*/*", "acme/llama"), frozenset({"acme"})), False, id="never of one that is apart"),
    ],
)
def test_pooling_rule_matches_patterns_and_exclusions(sharing: PoolingRule, want: bool) -> None:
    assert sharing.is_pooled("acme", "llama") is want
