"""Spans track which bytes are ready: exactly the added ones, in any order. Pieces are completed once, when whole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.client.spans_policy import Span, Spans, completed_pieces, merge_spans, spans_of

TOTAL = 100


def spans(*given: Span) -> Spans:
    found = Spans(TOTAL)
    for span in given:
        found.add(*span)
    return found


@pytest.mark.parametrize(
    ("existing", "added", "want"),
    [
        pytest.param((), (0, 10), (0, 10), id="the first"),
        pytest.param(((0, 10),), (20, 30), (20, 30), id="one apart"),
        pytest.param(((0, 10),), (10, 20), (0, 20), id="one behind"),
        pytest.param(((20, 30),), (10, 20), (10, 30), id="one before"),
        pytest.param(((0, 10), (20, 30), (50, 60)), (10, 20), (0, 30), id="one between"),
        pytest.param(((0, 50),), (50, 100), (0, 100), id="the last"),
    ],
)
def test_adjacent_spans_are_merged(existing: tuple[Span, ...], added: Span, want: Span) -> None:
    """Adjacent spans are merged."""
    assert spans(*existing).add(*added) == want


@pytest.mark.parametrize(
    ("existing", "added", "rule"),
    [
        pytest.param((), (5, 5), "no part", id="nothing"),
        pytest.param((), (6, 5), "no part", id="backwards"),
        pytest.param((), (-1, 5), "no part", id="before the beginning"),
        pytest.param((), (99, 101), "no part", id="beyond the end"),
        pytest.param(((0, 10),), (0, 10), "already", id="the same"),
        pytest.param(((0, 10),), (2, 3), "already", id="within"),
        pytest.param(((5, 10),), (0, 20), "already", id="around"),
        pytest.param(((5, 10),), (9, 20), "already", id="over its end"),
        pytest.param(((5, 10),), (0, 6), "already", id="over its beginning"),
    ],
)
def test_invalid_span_is_refused(existing: tuple[Span, ...], added: Span, rule: str) -> None:
    """An invalid or overlapping span is refused, and changes nothing."""
    found = spans(*existing)
    gaps = found.gaps()
    with pytest.raises(ValueError, match=rule):
        found.add(*added)
    assert found.gaps() == gaps


def test_empty_spans_are_whole() -> None:
    assert Spans(0).is_whole
    assert not Spans(1).is_whole
    assert Spans(0).gaps() == ()
    assert Spans(1).covers(1, 1)


def pieces(lengths: list[int]) -> list[Span]:
    """Return adjacent spans of these lengths."""
    edges = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    return list(pairwise(edges))


@given(lengths=st.lists(st.integers(1, 9), max_size=12), data=st.data(), piece=st.integers(1, 12))
def test_spans_may_be_added_in_any_order(lengths: list[int], data: st.DataObject, piece: int) -> None:
    """Compared with a set of bytes after each step. Each piece is reported once, with its last byte."""
    order = data.draw(st.permutations(pieces(lengths)))
    found, model = Spans(sum(lengths)), set[int]()
    found_pieces: list[Span] = []
    for begin, end in order:
        around = found.add(begin, end)
        model |= set(range(begin, end))
        assert begin >= around[0]
        assert end <= around[1]
        for at in range(found.total + 1):
            assert found.covers(at, min(at + 3, found.total)) == (set(range(at, min(at + 3, found.total))) <= model)
        assert {at for gap in found.gaps() for at in range(*gap)} == set(range(found.total)) - model
        new = list(completed_pieces((begin, end), around, piece, found.total))
        assert all(set(range(*each)) <= model for each in new)
        found_pieces += new
    assert found.is_whole
    rest = found.total % piece
    assert sorted(found_pieces) == pieces([piece] * (found.total // piece) + [rest] * (rest > 0))


@given(lengths=st.lists(st.integers(1, 5), max_size=12), data=st.data())
def test_merged_spans_are_disjoint_and_complete(lengths: list[int], data: st.DataObject) -> None:
    """The merged spans have the same bytes, and no two of them touch."""
    chosen = [span for span in data.draw(st.permutations(pieces(lengths))) if data.draw(st.booleans())]
    found = merge_spans(chosen)
    assert [at for span in found for at in range(*span)] == sorted(at for span in chosen for at in range(*span))
    assert all(one[1] < other[0] for one, other in pairwise(found))


def test_repeated_chunk_has_two_spans() -> None:
    """A repeated chunk has two spans, and both are ready with it."""
    assert spans_of([("a", 4), ("b", 2), ("a", 4)]) == {"a": ((0, 4), (6, 10)), "b": ((4, 6),)}
