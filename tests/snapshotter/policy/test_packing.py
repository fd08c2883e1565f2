"""Packs hold every chunk once, in order, within their size."""

from hypothesis import given
from hypothesis import strategies as st

from snapshotter.policy.layout import group

LIMIT = 100


@given(st.lists(st.integers(1, 150)))
def test_group(lengths: list[int]) -> None:
    """For any chunks: none lost or reordered, no pack over the limit but a lone chunk, no two that fit in one."""
    chunks = [(str(number), length) for number, length in enumerate(lengths)]
    packs = list(group(chunks, LIMIT))
    assert [chunk for pack in packs for chunk in pack] == chunks
    totals = [sum(length for _, length in pack) for pack in packs]
    assert all(total <= LIMIT or len(pack) == 1 for total, pack in zip(totals, packs, strict=True))
    assert all(total + pack[0][1] > LIMIT for total, pack in zip(totals, packs[1:], strict=False))
