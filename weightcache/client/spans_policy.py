"""Which parts of a version's bytes may be read while others are on their way. Pure.

A span is its first byte and the first byte after it, in the version's linear space.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]


class Spans:
    """Disjoint parts of `total` bytes, neighbours merged; they only become more."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __repr__(self) -> str:
        return f"<Spans {len(self._begins)} of {self.total} bytes>"

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return self.covers(0, self.total)

    def covers(self, begin: int, end: int) -> bool:
        """Whether all of these bytes are there; of none, yes."""
        at = bisect_right(self._begins, begin) - 1
        return begin == end or (at >= 0 and end <= self._ends[at])

    def add(self, begin: int, end: int) -> Span:
        """Returns what these bytes, with those around them, are now. Raises ValueError for none, for such as are
        outside, and for such as are there already.
        """
        if not 0 <= begin < end <= self.total:
            raise ValueError(f"{begin} to {end} is no part of {self.total} bytes")
        at = bisect_left(self._begins, begin)
        before = self._ends[at - 1] if at else -1
        after = self._begins[at] if at < len(self._begins) else self.total + 1
        if before > begin or after < end:
            raise ValueError(f"{begin} to {end} is there already")
        first, last = at - (before == begin), at + (after == end)
        around = self._begins[first] if before == begin else begin, self._ends[at] if after == end else end
        self._begins[first:last] = [around[0]]
        self._ends[first:last] = [around[1]]
        return around

    def gaps(self) -> tuple[Span, ...]:
        """What is not there yet."""
        edges = zip([0, *self._ends], [*self._begins, self.total], strict=True)
        return tuple((begin, end) for begin, end in edges if begin < end)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return disjoint spans in order, with adjacent ones joined."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return tuple(found)


def spans_of(chunks: Iterable[tuple[str, int]]) -> dict[str, tuple[Span, ...]]:
    """Where each digest of (digest, length), in the order of the linear space, is: a chunk may occur again."""
    found: dict[str, tuple[Span, ...]] = {}
    begin = 0
    for digest, length in chunks:
        found[digest] = (*found.get(digest, ()), (begin, begin + length))
        begin += length
    return found


def completed(added: Span, around: Span, piece: int, total: int) -> Iterator[Span]:
    """The pieces that are whole since `added` came, which made `around` (see `Spans.add`): `total` bytes are cut every
    `piece` bytes, from the start.
    """
    for begin in range(added[0] // piece * piece, added[1], piece):
        end = min(begin + piece, total)
        if around[0] <= begin and end <= around[1]:
            yield begin, end
