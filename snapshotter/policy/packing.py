"""Which chunks travel together: consecutive ones, up to the size of a pack, so that disks see long reads."""

from collections.abc import Iterable, Iterator


def group(chunks: Iterable[tuple[str, int]], pack_bytes: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Split (digest, length) pairs, in order, into groups of at most `pack_bytes` (a larger chunk stands alone)."""
    held: list[tuple[str, int]] = []
    total = 0
    for digest, length in chunks:
        if held and total + length > pack_bytes:
            yield tuple(held)
            held, total = [], 0
        held.append((digest, length))
        total += length
    if held:
        yield tuple(held)
