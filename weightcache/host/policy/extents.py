"""Place chunks in slabs, and map a version in few extents. Pure; `host_index.py` decides which slabs exist.

A mapping gets huge pages only if slab offset and virtual offset agree modulo 2 MiB. So a run of chunks that is long
enough for a huge page starts at an offset congruent to its virtual one. A slab is filled from its start and never
compacted: it is freed whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcache.client.lease_protocol import HUGE_PAGE


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A chunk of `length` bytes at offset `virtual` of its version's linear space; both are multiples of 4096."""

    digest: str
    length: int
    virtual: int


@dataclass(frozen=True, slots=True)
class FreeTail:
    """A slab that is free from offset `used` on."""

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
        """Return the offset of the first byte after the range."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of a version at offset `virtual`, stored at `offset` of `slab`."""

    virtual: int
    slab: int
    offset: int
    length: int


def distinct_chunks(chunks: Iterable[tuple[str, int]]) -> tuple[WantedChunk, ...]:
    """Return the distinct chunks of (digest, length) pairs in order of the linear space, at their first positions."""
    first: dict[str, WantedChunk] = {}
    virtual = 0
    for digest, length in chunks:
        first.setdefault(digest, WantedChunk(digest, length, virtual))
        virtual += length
    return tuple(first.values())


def place(
    wanted: Sequence[WantedChunk], rooms: Sequence[FreeTail], fresh: Sequence[int], slab_bytes: int
) -> dict[str, SlabRange]:
    """Return a place for each chunk. Raises IndexError if `fresh` has too few slabs.

    A run goes into the first slab with room for all of its remaining chunks. If there is none, its next chunks fill the
    first slab with room for one of them, or the next slab of `fresh`. No chunk may be longer than `slab_bytes`.
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
    """Return how many fresh slabs `place` opens for these chunks."""
    beyond = max((room.slab for room in rooms), default=-1) + 1
    fresh = range(beyond, beyond + len(wanted))  # a slab holds at least one chunk
    return len({spot.slab for spot in place(wanted, rooms, fresh, slab_bytes).values() if spot.slab >= beyond})


def extents_of(chunks: Iterable[tuple[str, int]], places: Mapping[str, SlabRange]) -> tuple[Extent, ...]:
    """Return the extents of the version's linear space: in order, without gaps from 0, adjacent ones merged."""
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
    """Return runs of chunks that are adjacent in the linear space."""
    runs: list[list[WantedChunk]] = []
    for chunk in wanted:
        if runs and runs[-1][-1].virtual + runs[-1][-1].length == chunk.virtual:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [tuple(run) for run in runs]


def _room_for(first: WantedChunk, length: int, used: Mapping[int, int], slab_bytes: int) -> int | None:
    """Return the first slab with room for a run of this length, else with room for its first chunk, else None."""
    found: int | None = None
    last = slab_bytes - first.length
    for slab, begin in used.items():
        if begin > last:
            continue  # the common case in a large version
        start = _start(first, length, begin, slab_bytes)
        if start + length <= slab_bytes:
            return slab
        if found is None and start <= last:
            found = slab
    return found


def _fitting(run: Sequence[WantedChunk], offset: int, slab_bytes: int) -> list[tuple[WantedChunk, int]]:
    """Return the leading chunks of the run that fit from `offset` on, each with its offset."""
    taken: list[tuple[WantedChunk, int]] = []
    for chunk in run:
        if offset + chunk.length > slab_bytes:
            break
        taken.append((chunk, offset))
        offset += chunk.length
    return taken


def _start(first: WantedChunk, length: int, used: int, slab_bytes: int) -> int:
    """Return the run's start: congruent to its virtual offset if huge pages are possible. The first chunk may not fit
    there in a used slab. In an empty slab it always fits.
    """
    congruent = used + (first.virtual - used) % HUGE_PAGE
    # A chunk nearly as long as the slab fits an empty one only at its start.
    fits = congruent + first.length <= slab_bytes or used > 0
    return congruent if length >= HUGE_PAGE and fits else used
