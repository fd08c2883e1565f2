"""A tenant's chunks are those of existing packs with a valid index. Chunks of damaged or missing packs are missing."""

from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStat, BlobUnavailable
from kelvin.blobstore.chunk_locations import ChunkLocation
from kelvin.blobstore.file_store import FileStore
from kelvin.blobstore.packs import (
    FileChunk,
    FileIndex,
    FileSpan,
    assign_offsets,
    encode_file_index,
    encode_footer,
    encode_table,
    file_pack,
)
from kelvin.contracts.artifacts.object_keys import index_key, pack_key
from snapshotter.store.catalog import Catalog

A, B, C = "a" * 64, "b" * 64, "c" * 64
P, Q = "1" * 64, "2" * 64


class CountingStore(FileStore):
    """A store that counts reads of index objects."""

    reads = 0

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += "/index/" in key
        return await super().read(key, offset, length)


async def test_chunks_follow_packs_and_indexes(tmp_path: Path) -> None:
    """Chunks are known while both pack and index exist. Each index is read once, and tenants are separate."""
    store = CountingStore(tmp_path)
    catalog = Catalog(store)
    assert await catalog.chunk_places("acme") == {}
    await store.put_if_absent(pack_key("acme", P), b"pack")
    assert await catalog.chunk_places("acme") == {}  # not indexed yet
    await store.put_if_absent(index_key("acme", P), encode_table(assign_offsets([(A, 4096), (B, 8192)])))
    want = {A: ChunkLocation(P, ((0, 4096),)), B: ChunkLocation(P, ((4096, 8192),))}
    assert await catalog.chunk_places("acme") == want
    assert await catalog.chunk_places("acme") == want
    assert store.reads == 1
    assert await catalog.chunk_places("umbrella") == {}
    await store.put_if_absent(pack_key("acme", Q), b"pack")
    await store.put_if_absent(index_key("acme", Q), b"[")
    assert await catalog.chunk_places("acme") == want
    size = len(b"pack") + 12288 + len(encode_footer(assign_offsets([(A, 4096), (B, 8192)])))
    assert (await catalog.stored_chunks("acme")).stored_bytes == size  # includes packs without a valid index
    assert (await catalog.stored_chunks("acme")).find_missing({A: 4096, B: 4096, C: 4096}) == {B: 4096, C: 4096}
    assert (await catalog.stored_chunks("umbrella")).stored_bytes == 0
    await store.delete(pack_key("acme", P))
    assert await catalog.chunk_places("acme") == {}
    assert (await catalog.stored_chunks("acme")).stored_bytes == len(b"pack")
    assert repr(catalog) == "<Catalog tenants=2>"


async def test_kept_files(tmp_path: Path) -> None:
    """A kept file holds the chunks of its index, and counts as stored itself. Its index may be replaced."""
    store = CountingStore(tmp_path)
    catalog = Catalog(store)
    pack, index = file_pack(P), FileIndex(chunks=(FileChunk(A, (FileSpan(73, 5000),)),), size=9000)
    await store.put_if_absent(pack_key("acme", pack), bytes(9000))
    found = await catalog.stored_chunks("acme")
    assert (found.files, found.stored_bytes, P in found) == (frozenset(), 9000, False)
    await store.put_if_absent(index_key("acme", pack), encode_file_index(index))
    found = await catalog.stored_chunks("acme")
    assert found.places == {A: ChunkLocation(pack, ((73, 5000),))}
    assert (found.files, found.stored_bytes) == (frozenset({P}), 9000)
    assert [name in found for name in (P, A, B)] == [True, True, False]
    assert found.find_missing({A: 8192, B: 4096}) == {B: 4096}
    await store.delete(index_key("acme", pack))
    assert (await catalog.stored_chunks("acme")).files == frozenset()
    other = FileIndex(chunks=(FileChunk(B, (FileSpan(80, 4096),)),), size=9000)
    await store.put_if_absent(index_key("acme", pack), encode_file_index(other))
    assert set(await catalog.chunk_places("acme")) == {B}


async def test_catalog_is_bounded(tmp_path: Path) -> None:
    """The tenants that were used least recently are forgotten."""
    catalog = Catalog(FileStore(tmp_path))
    for number in range(100):
        await catalog.chunk_places(f"t{number}")
    assert repr(catalog) == "<Catalog tenants=64>"


async def test_unreadable_index_hides_its_pack_alone(tmp_path: Path) -> None:
    """The pack's chunks count as missing, and its bytes count. An unavailable store fails the call."""

    class Sick(FileStore):
        away = False

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            if key == index_key("acme", P):
                raise BlobUnavailable("EIO")
            return await super().read(key, offset, length)

        async def stat(self, key: str) -> BlobStat:
            if self.away:
                raise BlobUnavailable("EIO")
            return await super().stat(key)

    store = Sick(tmp_path)
    for pack, chunk in ((P, A), (Q, B)):
        await store.put_if_absent(pack_key("acme", pack), b"pack")
        await store.put_if_absent(index_key("acme", pack), encode_table(assign_offsets([(chunk, 4096)])))
    stored = await Catalog(store).stored_chunks("acme")
    assert set(stored.places) == {B}
    assert stored.stored_bytes == len(b"pack") + 4096 + len(encode_footer(assign_offsets([(B, 4096)])))
    store.away = True
    with pytest.raises(BlobUnavailable):
        await Catalog(store).stored_chunks("acme")
