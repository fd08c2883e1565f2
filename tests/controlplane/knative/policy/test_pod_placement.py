"""The choice of a parked pod for a version, and the concurrency that a pool reports to its autoscaler."""

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
        pytest.param(5, [], None, id="no parked pod"),
        pytest.param(11, [FreePod("a", 10, 0)], None, id="no pod has room"),
        pytest.param(10, [FreePod("a", 10, 0)], "a", id="an exact fit"),
        pytest.param(5, [FreePod("a", 100, 0), FreePod("b", 10, 9)], "b", id="the smallest pod with room"),
        pytest.param(5, [FreePod("a", 10, 9), FreePod("b", 10, 3)], "b", id="the longest parked of equal pods"),
        pytest.param(50, [FreePod("a", 100, 0), FreePod("b", 10, 9)], "a", id="the large pod if only it fits"),
    ],
)
def test_choose(weight_bytes: int, spots: list[FreePod], want: str | None) -> None:
    found = choose_pod(weight_bytes, spots)
    assert (None if found is None else found.pod) == want


@given(st.lists(st.integers(0, 50), max_size=6), st.lists(st.integers(0, 50), max_size=8).map(sorted))
def test_best_fit_places_as_many_as_possible(sizes: list[int], rooms: list[int]) -> None:
    """Best fit in rising order of size places as many as any choice can. A version fits its pod, and no pod is given
    twice.
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
    """Return the largest count for which the smallest sizes fit the largest rooms."""
    for count in range(len(sizes), 0, -1):
        largest = rooms[len(rooms) - count :] if count <= len(rooms) else []
        if len(largest) == count and all(size <= room for size, room in zip(sizes[:count], largest, strict=True)):
            return count
    return 0


@pytest.mark.parametrize(
    ("weight_bytes", "want"),
    [
        pytest.param(10, "small", id="a version that fits both"),
        pytest.param(11, "large", id="a version that fits one"),
        pytest.param(101, None, id="a version that fits none"),
    ],
)
def test_pool_for(weight_bytes: int, want: str | None) -> None:
    found = pool_for(weight_bytes, (LARGE, SMALL))
    assert (None if found is None else found.name) == want


def test_pool_concurrency_counts_taken_waiting_and_buffer() -> None:
    """The sum is taken pods, waiting starts and the buffer, up to the pool's maximum."""
    assert pool_concurrency((SMALL, LARGE), {}, {}) == {"small": 2, "large": 1}
    assert pool_concurrency((SMALL, LARGE), {"small": 3}, {"small": 1, "large": 1}) == {"small": 6, "large": 2}
    assert pool_concurrency((LARGE,), {"large": 3}, {"large": 9}) == {"large": 3}


@pytest.mark.parametrize(
    ("sharing", "want"),
    [
        pytest.param(PoolingRule(), False, id="no patterns"),
        pytest.param(PoolingRule(("*/*",)), True, id="all models"),
        pytest.param(PoolingRule(("acme/*",)), True, id="all models of the tenant"),
        pytest.param(PoolingRule(("other/*", "acme/llama")), True, id="one pattern matches"),
        pytest.param(PoolingRule(("*/other", "other/llama")), False, id="no pattern matches"),
        pytest.param(PoolingRule(("*/*", "acme/llama"), frozenset({"acme"})), False, id="the tenant is excluded"),
    ],
)
def test_pooling_rule_matches_patterns_and_exclusions(sharing: PoolingRule, want: bool) -> None:
    assert sharing.is_pooled("acme", "llama") is want
