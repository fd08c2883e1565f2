"""Eviction takes slabs of the lowest value per size, no more than needed, and first from tenants over quota."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.host.policy.eviction import Candidate, TenantShares, choose_victims, rank

HALF_S = 10.0
OLD, MIDDLE, YOUNG = (
    Candidate(key, size, used_at, reload_s=float(size))
    for key, size, used_at in (("old", 1, 1.0), ("middle", 5, 2.0), ("young", 2, 3.0))
)


@pytest.mark.parametrize(
    ("need", "want"),
    [
        pytest.param(-3, (), id="nothing is needed"),
        pytest.param(0, (), id="nothing more is needed"),
        pytest.param(1, ("old",), id="the oldest alone will do"),
        pytest.param(2, ("old", "middle"), id="then the next, though another would fit better"),
        pytest.param(8, ("old", "middle", "young"), id="everything"),
        pytest.param(9, None, id="more than there is: nothing is evicted"),
    ],
)
def test_least_recently_used_go_first_at_equal_cost(need: int, want: tuple[str, ...] | None) -> None:
    """If all reload costs are the same per size, the least recently used go."""
    assert choose_victims([YOUNG, OLD, MIDDLE], need, HALF_S) == want


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        pytest.param(
            Candidate("k", 1, 0.0, 2.0), Candidate("g", 1, 0.0, 1.0), id="the one that costs more to reload stays"
        ),
        pytest.param(Candidate("k", 1, 0.0, 1.0), Candidate("g", 2, 0.0, 1.0), id="the one that frees less stays"),
        pytest.param(Candidate("k", 1, 9.0, 1.0), Candidate("g", 1, 0.0, 1.8), id="0.9 half-lives outweigh 1.8x"),
        pytest.param(Candidate("k", 1, 0.0, 2.1), Candidate("g", 1, 10.0, 1.0), id="and 2.1x outweighs a whole one"),
        pytest.param(Candidate("k", 1, 1e9, 1e-9), Candidate("g", 1, 0.0, 1e9), id="a great age outweighs any cost"),
        pytest.param(Candidate("k", 1, 1.0, 0.0), Candidate("g", 1, 0.0, 0.0), id="no cost at all: the older goes"),
    ],
)
def test_rank_by_value(kept: Candidate[str], gone: Candidate[str]) -> None:
    assert choose_victims([kept, gone], 1, HALF_S) == choose_victims([gone, kept], 1, HALF_S) == ("g",)


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        key=st.integers(0, 999),
        size=st.integers(1, 9),
        used_at=st.integers(0, 100).map(float),
        reload_s=st.floats(0.01, 100),
        tenant=st.sampled_from("abc"),
    ),
    max_size=12,
    unique_by=lambda each: each.key,
)


def value(candidate: Candidate[int], now: float) -> float:
    """Return the value by its definition: reload time, halved per half-life, per size."""
    recency = 0.5 ** ((now - candidate.used_at) / HALF_S)
    return float(candidate.reload_s * recency / candidate.size)


@given(candidates=CANDIDATES, now=st.floats(100, 1000))
def test_the_order_is_that_of_the_values_at_any_time(candidates: Sequence[Candidate[int]], now: float) -> None:
    """`rank`, which uses logarithms, gives the order of the values at any time."""
    ranked = sorted(candidates, key=lambda each: rank(each, HALF_S))
    values = [value(each, now) for each in ranked]
    assert all(one <= two or math.isclose(one, two, rel_tol=1e-9) for one, two in pairwise(values))


@given(candidates=CANDIDATES, need=st.integers(-2, 60), quota=st.integers(0, 30), coming=st.integers(0, 9))
def test_choice_spares_tenants_within_quota(
    candidates: Sequence[Candidate[int]], need: int, quota: int, coming: int
) -> None:
    """The choice is enough and not too much. Tenants within quota lose nothing to, or before, tenants over it."""
    held = Counter({"a": coming})
    for each in candidates:
        held[each.tenant] += each.size
    chosen = choose_victims(candidates, need, HALF_S, TenantShares(held, quota, "a"))
    named = {each.key: each for each in candidates}
    if need <= 0:
        assert chosen == ()
        return
    gone, left = chosen or (), held.copy()
    for each in [named[key] for key in gone]:
        if left[each.tenant] <= quota:
            over = {other.tenant for other in candidates if other.key not in gone and left[other.tenant] > quota}
            assert not over, "a tenant over its quota loses first"
            assert each.tenant == "a" or left["a"] <= quota, "a tenant over its quota takes nothing of others"
        left[each.tenant] -= each.size
    if chosen is not None:
        assert sum(named[key].size for key in chosen) >= need > sum(named[key].size for key in chosen[:-1])
    elif held["a"] <= quota:
        assert sum(each.size for each in candidates) < need


@pytest.mark.parametrize(
    ("asking", "need", "want"),
    [
        pytest.param("a", 1, ("a1",), id="a tenant over its quota loses its own slab"),
        pytest.param("a", 3, None, id="and takes none of tenants within theirs"),
        pytest.param("b", 1, ("a1",), id="a tenant within its quota takes from one over it"),
        pytest.param("b", 2, ("b1", "a1"), id="both are over their quota, and both lose"),
        pytest.param("c", 2, ("a1", "b1"), id="down to the quota, then of all by value"),
    ],
)
def test_tenant_over_its_quota_loses_first(asking: str, need: int, want: tuple[str, ...] | None) -> None:
    """`a` has three slabs, one of them busy, `b` has one of lowest value, and the quota is two slabs."""
    candidates = [
        Candidate("b1", 1, 0.0, tenant="b"),
        Candidate("a1", 1, 5.0, tenant="a"),
        Candidate("a2", 1, 6.0, tenant="a"),
    ]
    held = Counter(a=3, b=1)
    held[asking] += need
    assert choose_victims(candidates, need, HALF_S, TenantShares(held, 2, asking)) == want
