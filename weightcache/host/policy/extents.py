"""Where chunks go inside slabs, and how to map a version in few parts. Pure; `host_index.py` decides which slabs exist.

A mapping gets huge pages only where slab offset and virtual offset agree modulo 2 MiB, so a run of chunks that is long
enough to hold such a page starts at an offset congruent to its own. A slab is filled from its start and never
compacted: it is freed whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcache.client.lease_protocol import HUGE_PAGE


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk of `length` bytes at `virtual` of its version's linear space; both are multiples of 4096."""

    digest: str
    length: int
    virtual: int


@dataclass(frozen=True, slots=True)
class FreeTail:
    """A slab whose bytes from `used` on are free."""

    slab: int
    used: int


@dataclass(frozen=True, slots=True)
class SlabRange:
    """`length` bytes at `offset` of `slab`."""

    slab: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of a version at `virtual`, which lie at `offset` of `slab`."""

    virtual: int
    slab: int
    offset: int
    length: int


def distinct_chunks(chunks: Iterable[tuple[str, int]]) -> tuple[WantedChunk, ...]:
    """(digest, length) pairs in the order of the linear space; a digest that occurs again is wanted once."""
    first: dict[str, WantedChunk] = {}
    virtual = 0
    for digest, length in chunks:
        first.setdefault(digest, WantedChunk(digest, length, virtual))
        virtual += length
    return tuple(first.values())


def place(
    wanted: Sequence[WantedChunk], rooms: Sequence[FreeTail], fresh: Sequence[int], slab_bytes: int
) -> dict[str, SlabRange]:
    """A place for each chunk: a run goes into the first room that holds all that is left of it, else into what there
    is, in order, else into slabs of `fresh`, in order. Raises IndexError where those are too few.

    No chunk may be longer than `slab_bytes`.
    """
    used = {room.slab: room.used for room in rooms}
    unopened = iter(fresh)
    placed: dict[str, SlabRange] = {}
    for run in _runs(wanted):
        left, length = run, sum(chunk.length for chunk in run)
        while left:
            slab = _room_for(left[0], length, used, slab_bytes)
            if slab is None:
                slab = next(unopened, None)
                if slab is None:
                    raise IndexError("more slabs are needed")
                used[slab] = 0
            taken = _fitting(left, _start(left[0], length, used[slab], slab_bytes), slab_bytes)
            for chunk, spot in taken:
                placed[chunk.digest] = SlabRange(slab, spot, chunk.length)
                used[slab] = spot + chunk.length
                length -= chunk.length
            left = left[len(taken) :]
    return placed


def count_fresh_slabs(wanted: Sequence[WantedChunk], rooms: Sequence[FreeTail], slab_bytes: int) -> int:
    """How many fresh slabs `place` opens for these chunks."""
    beyond = max((room.slab for room in rooms), default=-1) + 1
    fresh = range(beyond, beyond + len(wanted))  # a slab holds at least one chunk
    return len({spot.slab for spot in place(wanted, rooms, fresh, slab_bytes).values() if spot.slab >= beyond})


def extents_of(chunks: Iterable[tuple[str, int]], places: Mapping[str, SlabRange]) -> tuple[Extent, ...]:
    """The version's linear space, neighbours coalesced: gapless from 0, in order."""
    extents: list[Extent] = []
    virtual = 0
    for digest, length in chunks:
        spot = places[digest]
        last = extents[-1] if extents else None
        if last is not None and last.slab == spot.slab and last.offset + last.length == spot.offset:
            extents[-1] = Extent(last.virtual, last.slab, last.offset, last.length + length)
        else:
            extents.append(Extent(virtual, spot.slab, spot.offset, length))
        virtual += length
    return tuple(extents)


def _runs(wanted: Sequence[WantedChunk]) -> list[tuple[WantedChunk, ...]]:
    """Chunks that follow one another in the linear space, together."""
    runs: list[list[WantedChunk]] = []
    for chunk in wanted:
        if runs and runs[-1][-1].virtual + runs[-1][-1].length == chunk.virtual:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [tuple(run) for run in runs]


def _room_for(first: WantedChunk, length: int, used: Mapping[int, int], slab_bytes: int) -> int | None:
    """The first slab that takes a whole run of this length, else the first that takes its first chunk, else None."""
    found: int | None = None
    last = slab_bytes - first.length
    for slab, begin in used.items():
        if begin > last:
            continue  # most of them, where a version is large
        start = _start(first, length, begin, slab_bytes)
        if start + length <= slab_bytes:
            return slab
        if found is None and start <= last:
            found = slab
    return found


def _fitting(run: Sequence[WantedChunk], offset: int, slab_bytes: int) -> list[tuple[WantedChunk, int]]:
    """The leading chunks of the run that fit from `offset` on, each with its own."""
    taken: list[tuple[WantedChunk, int]] = []
    for chunk in run:
        if offset + chunk.length > slab_bytes:
            break
        taken.append((chunk, offset))
        offset += chunk.length
    return taken


def _start(first: WantedChunk, length: int, used: int, slab_bytes: int) -> int:
    """Congruent to the run's virtual offset where a huge page may come of it, and where its first chunk still fits."""
    congruent = used + (first.virtual - used) % HUGE_PAGE
    # A chunk nearly as long as the slab fits an empty one only at its start.
    fits = congruent + first.length <= slab_bytes or used > 0
    return congruent if length >= HUGE_PAGE and fits else used
