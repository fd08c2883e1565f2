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
    """A slab that is free from offset `used_bytes` on."""

    slab: int
    used_bytes: int


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
    chunk_by_digest: dict[str, WantedChunk] = {}
    virtual = 0
    for digest, length in chunks:
        chunk_by_digest.setdefault(digest, WantedChunk(digest, length, virtual))
        virtual += length
    return tuple(chunk_by_digest.values())


def place_chunks(
    wanted: Sequence[WantedChunk], free_tails: Sequence[FreeTail], new_slabs: Sequence[int], slab_bytes: int
) -> dict[str, SlabRange]:
    """Return a place for each chunk. Raises IndexError if `new_slabs` has too few.

    A run goes into the first slab with room for all of its remaining chunks. If there is none, its next chunks fill the
    first slab with room for one of them, or the next one of `new_slabs`. No chunk may be longer than `slab_bytes`.
    """
    used_by_slab = {tail.slab: tail.used_bytes for tail in free_tails}
    unopened = iter(new_slabs)
    places: dict[str, SlabRange] = {}
    for run in _runs(wanted):
        remaining, length = run, sum(chunk.length for chunk in run)
        while remaining:
            slab = _find_slab(remaining[0], length, used_by_slab, slab_bytes)
            if slab is None:
                slab = next(unopened, None)
                if slab is None:
                    raise IndexError("more slabs are needed")
                used_by_slab[slab] = 0
            start = _start_offset(remaining[0], length, used_by_slab[slab], slab_bytes)
            fitting = _fitting(remaining, start, slab_bytes)
            for chunk, offset in fitting:
                places[chunk.digest] = SlabRange(slab, offset, chunk.length)
                used_by_slab[slab] = offset + chunk.length
                length -= chunk.length
            remaining = remaining[len(fitting) :]
    return places


def count_new_slabs(wanted: Sequence[WantedChunk], free_tails: Sequence[FreeTail], slab_bytes: int) -> int:
    """Return how many new slabs `place_chunks` opens for these chunks."""
    first = max((tail.slab for tail in free_tails), default=-1) + 1
    new_slabs = range(first, first + len(wanted))  # a slab holds at least one chunk
    places = place_chunks(wanted, free_tails, new_slabs, slab_bytes).values()
    return len({place.slab for place in places if place.slab >= first})


def extents_of(chunks: Iterable[tuple[str, int]], places: Mapping[str, SlabRange]) -> tuple[Extent, ...]:
    """Return the extents of the version's linear space: in order, without gaps from 0, adjacent ones merged."""
    extents: list[Extent] = []
    virtual = 0
    for digest, length in chunks:
        place = places[digest]
        last = extents[-1] if extents else None
        if last is not None and last.slab == place.slab and last.offset + last.length == place.offset:
            extents[-1] = Extent(last.virtual, last.slab, last.offset, last.length + length)
        else:
            extents.append(Extent(virtual, place.slab, place.offset, length))
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


def _find_slab(first: WantedChunk, length: int, used_by_slab: Mapping[int, int], slab_bytes: int) -> int | None:
    """Return the first slab with room for a run of this length, else with room for its first chunk, else None."""
    fallback: int | None = None
    last_start = slab_bytes - first.length
    for slab, begin in used_by_slab.items():
        if begin > last_start:
            continue  # the common case in a large version
        start = _start_offset(first, length, begin, slab_bytes)
        if start + length <= slab_bytes:
            return slab
        if fallback is None and start <= last_start:
            fallback = slab
    return fallback


def _fitting(run: Sequence[WantedChunk], offset: int, slab_bytes: int) -> list[tuple[WantedChunk, int]]:
    """Return the leading chunks of the run that fit from `offset` on, each with its offset."""
    fitting: list[tuple[WantedChunk, int]] = []
    for chunk in run:
        if offset + chunk.length > slab_bytes:
            break
        fitting.append((chunk, offset))
        offset += chunk.length
    return fitting


def _start_offset(first: WantedChunk, length: int, used_bytes: int, slab_bytes: int) -> int:
    """Return the run's start: congruent to its virtual offset if huge pages are possible. The first chunk may not fit
    there in a used slab. In an empty slab it always fits.
    """
    congruent = used_bytes + (first.virtual - used_bytes) % HUGE_PAGE
    # A chunk nearly as long as the slab fits an empty one only at its start.
    fits = congruent + first.length <= slab_bytes or used_bytes > 0
    return congruent if length >= HUGE_PAGE and fits else used_bytes
