"""Slabs are made first for waiting loads, then for stock, and never beyond the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.host.policy.pool_sizes import SlabCounts, choose_thread_counts, slabs_to_make, spare_slabs

GIB = 1 << 30


@pytest.mark.parametrize(
    ("stock", "limit", "want"),
    [
        pytest.param(SlabCounts(used=0, free=0, being_made=0, waiting=0), 8, 1, id="one after another for stock"),
        pytest.param(SlabCounts(used=0, free=0, being_made=1, waiting=0), 8, 0, id="the next one when that is made"),
        pytest.param(SlabCounts(used=0, free=3, being_made=0, waiting=0), 8, 0, id="enough is in stock"),
        pytest.param(SlabCounts(used=2, free=1, being_made=0, waiting=0), 8, 1, id="a taken slab is replaced"),
        pytest.param(SlabCounts(used=7, free=1, being_made=0, waiting=0), 8, 0, id="the whole budget exists already"),
        pytest.param(SlabCounts(used=0, free=0, being_made=0, waiting=5), 8, 2, id="two at once for waiting loads"),
        pytest.param(SlabCounts(used=0, free=0, being_made=1, waiting=5), 8, 1, id="one is being made already"),
        pytest.param(SlabCounts(used=0, free=0, being_made=1, waiting=1), 8, 0, id="the one being made is enough"),
        pytest.param(
            SlabCounts(used=7, free=0, being_made=0, waiting=5), 8, 1, id="no more than the budget, however many wait"
        ),
        pytest.param(SlabCounts(used=8, free=0, being_made=0, waiting=1), 8, 0, id="the budget is used: callers wait"),
        pytest.param(SlabCounts(used=0, free=0, being_made=0, waiting=0), 0, 0, id="closed"),
    ],
)
def test_slabs_to_make(stock: SlabCounts, limit: int, want: int) -> None:
    """Three spare slabs are wanted, and at most two are made at once."""
    assert slabs_to_make(stock, limit, spare=3, at_once=2) == want


@given(*(st.integers(0, 9) for _ in range(4)), st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_slab_making_stays_within_bounds(
    used: int, free: int, making: int, waiting: int, limit: int, spare: int, at_once: int
) -> None:
    """Neither the budget nor the number of threads is exceeded, and a waiting load gets a slab if one can be made."""
    more = slabs_to_make(SlabCounts(used, free, making, waiting), limit, spare, at_once)
    assert more >= 0
    if more:
        assert used + free + making + more <= limit
        assert making + more <= at_once
    if waiting and not free and not making and used < limit:
        assert more >= 1


@pytest.mark.parametrize(
    ("host", "slab", "spare", "want"),
    [
        pytest.param(8 * GIB, GIB // 4, GIB, 4, id="whole slabs"),
        pytest.param(8 * GIB, GIB // 4, GIB - 1, 3, id="no more than asked for"),
        pytest.param(8 * GIB, GIB // 4, 0, 1, id="one at least"),
        pytest.param(GIB, GIB // 4, 8 * GIB, 4, id="within the budget"),
    ],
)
def test_spare_of(host: int, slab: int, spare: int, want: int) -> None:
    """A setting in bytes becomes a number of slabs."""
    assert spare_slabs(host, slab, spare) == want


@pytest.mark.parametrize(
    ("cores", "want"),
    [
        pytest.param(1, (8, 2, 1), id="a disk needs several readers even with one core"),
        pytest.param(2, (8, 2, 1), id="two"),
        pytest.param(8, (8, 4, 4), id="eight"),
        pytest.param(192, (16, 8, 4), id="no disk needs more"),
    ],
)
def test_thread_counts_follow_cores_within_bounds(cores: int, want: tuple[int, int, int]) -> None:
    """Threads depend on the cores, within bounds. Each reader has one chunk to read and a next one."""
    threads = choose_thread_counts(cores)
    assert (threads.read, threads.hash, threads.make) == want
    assert threads.loads_at_once == 2 * want[0] + want[1]
