"""KV blocks are held once or free, in any order of requests, and worst cases are counted to the token."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE, BlockPool, blocks_for, worst_case_tokens


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param(1, 1, id="one token takes a block"),
        pytest.param(BLOCK_SIZE, 1, id="a full block is one block"),
        pytest.param(BLOCK_SIZE + 1, 2, id="one more token takes another"),
    ],
)
def test_blocks_for(tokens: int, want: int) -> None:
    assert blocks_for(tokens) == want


def test_last_generated_token_needs_no_kv() -> None:
    """The last generated token is never attended to."""
    assert worst_case_tokens(prompt_tokens=16, max_tokens=1) == 16


def test_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.try_allocate(2) is not None
    assert pool.try_allocate(2) is None
    assert pool.free == 1
    pool.check_integrity()


def test_release_of_strangers_changes_nothing() -> None:
    """A block that is not held, or given back twice at once, is refused whole."""
    pool = BlockPool(3)
    held = pool.try_allocate(2)
    assert held is not None
    for wrong in ((*held, 2), (held[0], held[0]), (-1,)):
        with pytest.raises(ValueError, match="are not held once each"):
            pool.release(wrong)
        pool.check_integrity()
        assert pool.free == 1


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda pool: pool._free.pop(), id="a block is lost"),
        pytest.param(lambda pool: pool._free.append(0), id="a block is free twice"),
        pytest.param(lambda pool: pool._held.add(0), id="a block is free and held"),
    ],
)
def test_integrity_check_goes_red(spoil: Callable[[BlockPool], object]) -> None:
    """Negative control: each disagreement is noticed."""
    pool = BlockPool(3)
    spoil(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(total=st.integers(1, 20), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_no_allocation_order_loses_blocks(total: int, steps: list[tuple[bool, int]]) -> None:
    """After any sequence of allocations and releases nothing is lost or shared."""
    pool = BlockPool(total)
    held: list[tuple[int, ...]] = []
    for take, number in steps:
        if take:
            before = pool.free
            blocks = pool.try_allocate(number)
            assert (blocks is None) == (number > before)
            if blocks is not None:
                held.append(blocks)
        elif held:
            pool.release(held.pop(number % len(held)))
        pool.check_integrity()
        everyone = [block for blocks in held for block in blocks]
        assert len(set(everyone)) == len(everyone) == total - pool.free
        assert set(everyone) <= set(range(total))
