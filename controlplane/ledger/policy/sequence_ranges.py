"""Represent arrived sequences as ranges. Normal form: ascending, disjoint, never adjacent."""

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]  # first and last sequence, inclusive


def add_to_ranges(received: Sequence[Range], sequences: Iterable[int]) -> list[Range]:
    """Return the normal form of ranges and sequences together. `received` is in normal form."""
    merged: list[Range] = []
    for first, last in sorted([*received, *((sequence, sequence) for sequence in set(sequences))]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def covers(received: Sequence[Range], sequence: int) -> bool:
    """Return whether the sequence arrived."""
    return any(first <= sequence <= last for first, last in received)


def gaps(received: Sequence[Range]) -> Iterator[Range]:
    """Yield the missing ranges between sequence 1 and the last one that arrived. `received` is in normal form."""
    expected = 1
    for first, last in received:
        if first > expected:
            yield expected, first - 1
        expected = last + 1
