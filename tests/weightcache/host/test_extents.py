"""Chunks are placed whole, without overlap, and congruent with huge pages. Extents describe the same placement."""

from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from weightcache.client.lease_protocol import HUGE_PAGE
from weightcache.host.policy.extents import (
    Extent,
    FreeTail,
    SlabRange,
    WantedChunk,
    count_new_slabs,
    distinct_chunks,
    extents_of,
    place_chunks,
)

SLAB = 8 * HUGE_PAGE


@st.composite
def versions(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Draw chunks of one page to 1.5 huge pages. Some digests repeat."""
    lengths = st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, HUGE_PAGE // 2, HUGE_PAGE, HUGE_PAGE + HUGE_PAGE // 2])
    names = st.integers(0, 40)
    sizes: dict[int, int] = {}
    return [(f"{name:064x}", sizes.setdefault(name, draw(lengths))) for name in draw(st.lists(names, max_size=60))]


@st.composite
def rooms(draw: st.DrawFn) -> list[FreeTail]:
    used = draw(st.lists(st.integers(0, SLAB // PAGE_BYTES), max_size=4))
    return [FreeTail(slab, pages * PAGE_BYTES) for slab, pages in enumerate(used)]


@given(versions(), rooms())
def test_each_chunk_gets_one_place_without_overlap(chunks: list[tuple[str, int]], open_rooms: list[FreeTail]) -> None:
    """Each distinct chunk gets one place of its length in one slab, behind used bytes and without overlap."""
    wanted = distinct_chunks(chunks)
    fresh = range(100, 100 + count_new_slabs(wanted, open_rooms, SLAB))
    placed = place_chunks(wanted, open_rooms, fresh, SLAB)
    assert {digest: spot.length for digest, spot in placed.items()} == dict(chunks)
    ends = {room.slab: room.used_bytes for room in open_rooms} | dict.fromkeys(fresh, 0)
    for spot in sorted(placed.values(), key=lambda each: (each.slab, each.offset)):
        assert spot.offset >= ends[spot.slab]
        assert spot.offset % PAGE_BYTES == 0
        ends[spot.slab] = spot.end
    assert all(end <= SLAB for end in ends.values())
    assert {spot.slab for spot in placed.values()} >= set(fresh), "no fresh slab is left empty"


@given(versions())
def test_extents_cover_the_linear_space_once(chunks: list[tuple[str, int]]) -> None:
    """Extents cover the linear space once, in order, map each byte to its chunk, and are as few as possible."""
    wanted = distinct_chunks(chunks)
    places = place_chunks(wanted, (), range(count_new_slabs(wanted, (), SLAB)), SLAB)
    extents = extents_of(chunks, places)
    virtual = 0
    for extent in extents:
        assert extent.virtual == virtual
        virtual += extent.length
    assert virtual == sum(length for _, length in chunks)
    virtual = 0
    for digest, length in chunks:
        home = next(e for e in extents if e.virtual <= virtual < e.virtual + e.length)
        assert (home.slab, home.offset + virtual - home.virtual) == (places[digest].slab, places[digest].offset)
        virtual += length
    for left, right in pairwise(extents):
        assert (left.slab, left.offset + left.length) != (right.slab, right.offset)


@given(st.integers(0, 300), st.integers(1, 40))
def test_huge_runs_are_congruent(first_pages: int, count: int) -> None:
    """In every slab that it reaches, a run of a huge page or more keeps its virtual offset modulo 2 MiB."""
    before = WantedChunk("before", max(1, first_pages) * PAGE_BYTES, 0)
    run = [WantedChunk(f"{n}", HUGE_PAGE // 2, before.length + n * HUGE_PAGE // 2) for n in range(4, 4 + count)]
    wanted = [chunk for chunk in run if count * HUGE_PAGE // 2 >= HUGE_PAGE]
    placed = place_chunks(wanted, [FreeTail(0, 5 * PAGE_BYTES)], range(1, 60), SLAB)
    for slab in {spot.slab for spot in placed.values()}:
        in_slab = [chunk for chunk in wanted if placed[chunk.digest].slab == slab]
        if sum(chunk.length for chunk in wanted[wanted.index(in_slab[0]) :]) >= HUGE_PAGE:
            assert all((placed[chunk.digest].offset - chunk.virtual) % HUGE_PAGE == 0 for chunk in in_slab)


def chunks_of(*lengths: int) -> list[WantedChunk]:
    return list(distinct_chunks((f"c{n}", length) for n, length in enumerate(lengths)))


@pytest.mark.parametrize(
    ("wanted", "open_rooms", "want"),
    [
        pytest.param([], [], {}, id="no chunks"),
        pytest.param(
            chunks_of(PAGE_BYTES, PAGE_BYTES),
            [FreeTail(7, 3 * PAGE_BYTES)],
            {"c0": SlabRange(7, 3 * PAGE_BYTES, PAGE_BYTES), "c1": SlabRange(7, 4 * PAGE_BYTES, PAGE_BYTES)},
            id="a short run goes right behind what is used",
        ),
        pytest.param(
            chunks_of(HUGE_PAGE, PAGE_BYTES),
            [FreeTail(7, 3 * PAGE_BYTES)],
            {"c0": SlabRange(7, HUGE_PAGE, HUGE_PAGE), "c1": SlabRange(7, 2 * HUGE_PAGE, PAGE_BYTES)},
            id="a long run waits for the next congruent offset",
        ),
        pytest.param(
            chunks_of(HUGE_PAGE, HUGE_PAGE),
            [FreeTail(7, SLAB - HUGE_PAGE), FreeTail(8, SLAB - 2 * HUGE_PAGE)],
            {"c0": SlabRange(8, SLAB - 2 * HUGE_PAGE, HUGE_PAGE), "c1": SlabRange(8, SLAB - HUGE_PAGE, HUGE_PAGE)},
            id="a room that takes all of a run comes before one that takes a part",
        ),
        pytest.param(
            chunks_of(HUGE_PAGE, HUGE_PAGE),
            [FreeTail(7, SLAB - HUGE_PAGE)],
            {"c0": SlabRange(7, SLAB - HUGE_PAGE, HUGE_PAGE), "c1": SlabRange(100, HUGE_PAGE, HUGE_PAGE // 1)},
            id="a run is split between what is left of a slab and a fresh one",
        ),
        pytest.param(
            [WantedChunk("c0", SLAB, 5 * PAGE_BYTES)],
            [],
            {"c0": SlabRange(100, 0, SLAB)},
            id="a chunk as long as a slab gives up congruence",
        ),
    ],
)
def test_packing_rules(wanted: list[WantedChunk], open_rooms: list[FreeTail], want: dict[str, SlabRange]) -> None:
    if "c1" in want and want["c1"].slab == 100:
        want["c1"] = SlabRange(100, wanted[1].virtual % HUGE_PAGE, wanted[1].length)
    assert place_chunks(wanted, open_rooms, [100], SLAB) == want


class Counted:
    """A chunk that counts reads of its length."""

    reads = 0

    def __init__(self, number: int, length: int) -> None:
        self.digest, self.virtual, self._length = f"c{number}", number * length, length

    @property
    def length(self) -> int:
        Counted.reads += 1
        return self._length


def test_a_large_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing 60 GB takes linear time: the rest of a run is not scanned again for each slab."""
    monkeypatch.setattr(Counted, "reads", 0)
    chunks, slabs, length = 8000, 250, 8 << 20
    wanted = cast(list[WantedChunk], [Counted(number, length) for number in range(chunks)])
    placed = place_chunks(wanted, [], range(slabs), 256 << 20)
    assert [(spot.slab, spot.offset) for spot in placed.values()] == [
        (number // 32, number % 32 * length) for number in range(chunks)
    ]
    assert Counted.reads <= 10 * chunks + 10 * slabs


def test_too_few_fresh_slabs_raise() -> None:
    """Too few fresh slabs raise IndexError: it is a bug of the caller."""
    with pytest.raises(IndexError):
        place_chunks(chunks_of(SLAB, SLAB), [], [1], SLAB)


def test_a_chunk_that_occurs_twice() -> None:
    """A repeated chunk is stored once and mapped twice."""
    chunks = [("a", PAGE_BYTES), ("b", PAGE_BYTES), ("a", PAGE_BYTES)]
    places = place_chunks(distinct_chunks(chunks), [], [0], SLAB)
    assert extents_of(chunks, places) == (Extent(0, 0, 0, 2 * PAGE_BYTES), Extent(2 * PAGE_BYTES, 0, 0, PAGE_BYTES))
