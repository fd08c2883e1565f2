"""The index of a kept file round-trips, an invalid index is refused, and chunks are read from any spans of the file."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.blobstore import chunk_locations
from kelvin.blobstore.blob_store import BlobShort
from kelvin.blobstore.chunk_locations import ChunkLocation, decode_index, read_chunk
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.blobstore.packs import (
    FileChunk,
    FileIndex,
    FileSpan,
    assign_offsets,
    decode_file_index,
    digest_of_file_pack,
    encode_file_index,
    encode_table,
    file_pack,
)
from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Failure, Refused

A, B, F = "a" * 64, "b" * 64, "f" * 64
PACK = file_pack(F)


def chunk(digest: str, *spans: tuple[int, int]) -> FileChunk:
    return FileChunk(digest, tuple(FileSpan(*span) for span in spans))


GOOD = FileIndex(
    chunks=(chunk(A, (5000, 7), (73, 4097)), chunk(B, (4200, 1)), chunk(A, (9000, 7), (9100, 4097))), size=20_000
)


def test_names() -> None:
    """The name of a pack shows whether it is a kept file."""
    assert digest_of_file_pack(PACK) == F
    for other in (F, f"{F}.safetensors", f"{F[1:]}.tensors", f"x{F}.tensors", ".tensors"):
        assert digest_of_file_pack(other) is None


def test_round_trip() -> None:
    """A decoded index equals the encoded one. Lengths are whole pages, and a repeated chunk has its first location."""
    raw = encode_file_index(GOOD)
    assert decode_file_index(raw, PACK) == GOOD
    assert GOOD.lengths == {A: 3 * PAGE_BYTES, B: PAGE_BYTES}
    want = {A: ChunkLocation(PACK, ((5000, 7), (73, 4097))), B: ChunkLocation(PACK, ((4200, 1),))}
    assert decode_index(raw, PACK) == want
    assert want[A].length == 3 * PAGE_BYTES
    table = encode_table(assign_offsets([(A, PAGE_BYTES), (B, 2 * PAGE_BYTES)]))
    assert decode_index(table, F) == {
        A: ChunkLocation(F, ((0, PAGE_BYTES),)),
        B: ChunkLocation(F, ((PAGE_BYTES, 2 * PAGE_BYTES),)),
    }


@pytest.mark.parametrize(
    ("chunks", "size", "fault"),
    [
        pytest.param([chunk(A, (0, 10)), chunk(B, (9, 10))], 100, "overlaps", id="two chunks of one byte"),
        pytest.param([chunk(A, (0, 10), (5, 1))], 100, "overlaps", id="spans of one byte"),
        pytest.param([chunk(A, (90, 11))], 100, "100 bytes", id="a span after the end"),
        pytest.param([chunk(A, (0, 10)), chunk(A, (10, 5000))], 9000, "two lengths", id="one chunk, two lengths"),
        pytest.param([chunk(A)], 100, "", id="a chunk of nothing"),
        pytest.param([chunk(A, (0, 0))], 100, "", id="an empty span"),
        pytest.param([chunk(A, (-1, 5))], 100, "", id="a span before the beginning"),
        pytest.param([chunk("a", (0, 5))], 100, "", id="an invalid digest"),
    ],
)
def test_refused(chunks: list[FileChunk], size: int, fault: str) -> None:
    """Decoding an invalid index names the fault before any byte of the file is read. Encoding it is refused too."""
    index = FileIndex(chunks=tuple(chunks), size=size)
    with pytest.raises(Refused, match=fault or "pack") as refused:
        decode_file_index(msgspec.json.encode(index, order="sorted"), PACK)
    assert isinstance(refused.value.failure, PackCorrupt)
    if fault:
        with pytest.raises(ValueError, match=fault):
            encode_file_index(index)


@given(st.data())
def test_any_flipped_bit(data: st.DataObject) -> None:
    """A flipped bit makes the index invalid or different. It never crashes and never decodes to the same index."""
    raw = bytearray(encode_file_index(GOOD))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    assert outcome(bytes(raw)) != GOOD


def outcome(raw: bytes) -> FileIndex | Failure:
    try:
        return decode_file_index(raw, PACK)
    except Refused as refused:
        return refused.failure


class Counting(MemoryStore):
    reads = 0

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        self.reads += 1
        await super().read_into(key, offset, into)


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 300), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
    gap_bytes=st.sampled_from([0, 100, 1 << 20]),
    run_bytes=st.sampled_from([1, 9000, 1 << 20]),
)
def test_reading(lengths: list[int], gaps: list[int], order: object, gap_bytes: int, run_bytes: int) -> None:
    """A chunk is its spans in order, each padded with zeros to a page, however reads are merged."""
    body = bytes((n * 7 + n // 256) % 251 + 1 for n in range(sum(lengths) + sum(gaps)))
    spans, at = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        spans.append((at + gap, length))
        at += gap + length
    order.shuffle(spans)  # type: ignore[attr-defined]
    want = b"".join(body[offset : offset + length] + bytes(-length % PAGE_BYTES) for offset, length in spans)

    async def read_counted() -> bytes:
        store = Counting()
        await store.put_if_absent("t/packs/p", body)
        found = await read_chunk(store, "t/packs/p", ChunkLocation("p", tuple(spans)))
        assert 1 <= store.reads <= len(spans)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_locations, "GAP_BYTES", gap_bytes)
        patch.setattr(chunk_locations, "RUN_BYTES", run_bytes)
        assert asyncio.run(read_counted()) == want


async def test_neighbours_are_one_read() -> None:
    """Nearby small tensors cost one read instead of one each. A truncated file raises `BlobShort`."""
    store = Counting()
    await store.put_if_absent("t/packs/p", bytes(50_000))
    near = ChunkLocation("p", tuple((n * 150, 32) for n in range(300)))
    assert await read_chunk(store, "t/packs/p", near) == bytes(300 * PAGE_BYTES)
    assert store.reads == 1
    with pytest.raises(BlobShort):
        await read_chunk(store, "t/packs/p", ChunkLocation("p", ((49_000, 2000),)))
