"""Track which parts of a version's bytes are readable while others are still loading. Pure.

A span is (first byte, first byte after it) in the version's linear space.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]


class Spans:
    """A growing set of disjoint parts of `total` bytes. Adjacent parts are merged."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __repr__(self) -> str:
        return f"<Spans {len(self._begins)} of {self.total} bytes>"

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are in the set."""
        return self.covers(0, self.total)

    def covers(self, begin: int, end: int) -> bool:
        """Return whether all these bytes are in the set. True for an empty range."""
        index = bisect_right(self._begins, begin) - 1
        return begin == end or (index >= 0 and end <= self._ends[index])

    def add(self, begin: int, end: int) -> Span:
        """Add a part and return the merged part that contains it. Raises ValueError if the part is empty, outside the
        range, or overlaps the set.
        """
        if not 0 <= begin < end <= self.total:
            raise ValueError(f"{begin} to {end} is no part of {self.total} bytes")
        index = bisect_left(self._begins, begin)
        before = self._ends[index - 1] if index else -1
        after = self._begins[index] if index < len(self._begins) else self.total + 1
        if before > begin or after < end:
            raise ValueError(f"{begin} to {end} is there already")
        first, last = index - (before == begin), index + (after == end)
        merged_span = self._begins[first] if before == begin else begin, self._ends[index] if after == end else end
        self._begins[first:last] = [merged_span[0]]
        self._ends[first:last] = [merged_span[1]]
        return merged_span

    def gaps(self) -> tuple[Span, ...]:
        """Return the parts that are not in the set."""
        edges = zip([0, *self._ends], [*self._begins, self.total], strict=True)
        return tuple((begin, end) for begin, end in edges if begin < end)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return disjoint spans in order, with adjacent ones joined."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return tuple(found)


def spans_of(chunks: Iterable[tuple[str, int]]) -> dict[str, tuple[Span, ...]]:
    """Return the spans of each digest. `chunks` are (digest, length) in the order of the linear space."""
    found: dict[str, tuple[Span, ...]] = {}
    begin = 0
    for digest, length in chunks:
        found[digest] = (*found.get(digest, ()), (begin, begin + length))
        begin += length
    return found


def completed_pieces(added_span: Span, merged_span: Span, piece_bytes: int, total: int) -> Iterator[Span]:
    """Yield the pieces that `added_span` completed. `merged_span` contains it, as `Spans.add` returns it. Pieces are
    `piece_bytes` long and start at multiples of that; the last one ends at `total`.
    """
    for begin in range(added_span[0] // piece_bytes * piece_bytes, added_span[1], piece_bytes):
        end = min(begin + piece_bytes, total)
        if merged_span[0] <= begin and end <= merged_span[1]:
            yield begin, end
