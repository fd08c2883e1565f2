"""Where a chunk's bytes are in the store, and how to read them: one range of a pack, or spans of a kept file."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from kelvin.blobstore.blob_store import BlobStore
from kelvin.blobstore.packs import (
    TRAILER_BYTES,
    FileIndex,
    PackEntry,
    decode_file_index,
    decode_footer,
    decode_table,
    digest_of_file_pack,
    footer_bytes,
)
from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.manifest import pad_to_page
from kelvin.contracts.artifacts.object_keys import index_key, pack_key
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decoder

log = logging.getLogger(__name__)

# Spans at most this far apart are read with one request: a round trip to S3 costs more than the bytes between them.
GAP_BYTES: Final = 64 << 10
# Longest range of one such request. Each concurrent read needs a buffer of this size besides the chunk's memory.
RUN_BYTES: Final = 4 << 20

PackName = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(\.tensors)?$(?!\n)")]
Span = tuple[int, int]  # offset in the pack, length


class RangeReader(Protocol):
    """The part of a `BlobStore` that reads ranges."""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill all of `into` from `offset`, as `BlobStore.read_into` does."""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """The location of a chunk in a pack: spans in order, each followed by zeros up to a page."""

    pack: str
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        """Return the bytes of the chunk, padding included."""
        return sum(pad_to_page(length) for _, length in self.spans)


def location_of(pack: str, entry: PackEntry) -> ChunkLocation:
    """Return the location of a chunk in a pack of Kelvin's own layout."""
    return ChunkLocation(pack, ((entry.offset, entry.length),))


def kept_file_locations(pack: str, index: FileIndex) -> dict[str, ChunkLocation]:
    """Return the first location of each distinct chunk of a kept file."""
    found: dict[str, ChunkLocation] = {}
    for chunk in index.chunks:
        if chunk.digest not in found:
            found[chunk.digest] = ChunkLocation(pack, tuple((span.offset, span.length) for span in chunk.spans))
    return found


def decode_index(raw: bytes, pack: str) -> dict[str, ChunkLocation]:
    """Return the chunk locations of an index object. Its name decides its layout. Raises `Refused(PackCorrupt)`."""
    if digest_of_file_pack(pack) is not None:
        return kept_file_locations(pack, decode_file_index(raw, pack))
    return {entry.digest: location_of(pack, entry) for entry in decode_table(raw, pack)}


def encode_pack_list(packs: Iterable[str]) -> bytes:
    """Return the canonical pack list of a version: pack names, sorted, without duplicates."""
    return msgspec.json.encode(sorted(set(packs)))


def decode_pack_list(raw: bytes) -> tuple[str, ...] | None:
    """Return the pack names, or None if the object is damaged. The list is a hint: without it, read every index."""
    try:
        packs = decoder(tuple[PackName, ...]).decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return packs if encode_pack_list(packs) == raw else None


async def read_footer(store: BlobStore, key: str, size: int, pack: str) -> tuple[PackEntry, ...]:
    """Return the table at the end of a pack of `size` bytes. Raises `Refused(PackCorrupt)`, `BlobNotFound`."""
    # Pass lengths: a verifying store raises for a damaged object only if the whole of it is read.
    trailing = min(size, TRAILER_BYTES)
    length = footer_bytes(await store.read(key, size - trailing, trailing), size, pack)
    return decode_footer(await store.read(key, size - length, length), size, pack)


async def read_locations(store: BlobStore, tenant: str, pack: str) -> dict[str, ChunkLocation]:
    """Return the location of each chunk of a pack: from its index, or from its footer if the index can't be read.

    A kept file never has a footer of Kelvin's, whatever its last bytes are. Raises `BlobNotFound` if the pack, or the
    index of a kept file, does not exist; `Refused(PackCorrupt)` if it is damaged; `BlobUnavailable`.
    """
    try:
        return decode_index(await store.read(index_key(tenant, pack)), pack)
    except Refused as refused:
        if isinstance(refused.failure, PackCorrupt):
            log.warning("a pack's index is damaged", extra={"tenant": tenant, "pack": pack, "error": str(refused)})
        if digest_of_file_pack(pack) is not None:
            raise
    key = pack_key(tenant, pack)
    entries = await read_footer(store, key, (await store.stat(key)).size, pack)
    return {entry.digest: location_of(pack, entry) for entry in entries}


async def read_chunk(store: BlobStore, key: str, location: ChunkLocation) -> bytes:
    """Return the chunk's bytes, unverified. Raises as `BlobStore.read`."""
    into = bytearray(location.length)
    await read_chunk_into(store, key, location, memoryview(into))
    return bytes(into)


async def read_chunk_into(store: RangeReader, key: str, location: ChunkLocation, into: memoryview) -> None:
    """Fill all of `into` (`location.length` bytes). Raises as `BlobStore.read_into`. Nothing writes there later."""
    for run in _coalesced(location.spans):
        begin = run[0][0][0]
        (offset, length), at = run[-1]
        if len(run) == 1:
            await store.read_into(key, offset, into[at : at + length])
        else:
            together = memoryview(bytearray(offset + length - begin))
            await store.read_into(key, begin, together)
            for (start, nbytes), to in run:
                into[to : to + nbytes] = together[start - begin : start - begin + nbytes]
        for (_, nbytes), to in run:
            into[to + nbytes : to + pad_to_page(nbytes)] = bytes(pad_to_page(nbytes) - nbytes)


def _coalesced(spans: tuple[Span, ...]) -> Iterator[list[tuple[Span, int]]]:
    """Yield spans in order of the file, with offsets in the chunk. The spans of one list are read with one request."""
    placed: list[tuple[Span, int]] = []
    at = 0
    for span in spans:
        placed.append((span, at))
        at += pad_to_page(span[1])
    placed.sort()
    run: list[tuple[Span, int]] = []
    for (offset, length), to in placed:
        if run:
            (before, nbytes), _ = run[-1]
            too_long = offset + length - run[0][0][0] > RUN_BYTES
            if too_long or offset - before - nbytes > GAP_BYTES:
                yield run
                run = []
        run.append(((offset, length), to))
    if run:
        yield run
