"""Where a chunk's bytes lie in the store, and reading them from there: one range of a pack, or spans of a kept file."""

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

# Spans this near to one another are read together: a round trip to S3 costs more than what lies between.
GAP_BYTES: Final = 64 << 10
# What is read together takes as much memory beside the chunk's own, in each of many reads at once.
RUN_BYTES: Final = 4 << 20

PackName = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(\.tensors)?$(?!\n)")]
Span = tuple[int, int]  # offset in the pack, length


class RangeReader(Protocol):
    """Of a `BlobStore`, what reads a range."""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """See `BlobStore`."""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """A chunk in a pack: spans one after another, each followed by zeros up to a page."""

    pack: str
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        """Bytes of the chunk, padding included."""
        return sum(pad_to_page(length) for _, length in self.spans)


def location_of(pack: str, entry: PackEntry) -> ChunkLocation:
    """Of a chunk in a pack of ours."""
    return ChunkLocation(pack, ((entry.offset, entry.length),))


def kept_file_locations(pack: str, index: FileIndex) -> dict[str, ChunkLocation]:
    """Of each distinct chunk of a kept file: its first place."""
    found: dict[str, ChunkLocation] = {}
    for chunk in index.chunks:
        if chunk.digest not in found:
            found[chunk.digest] = ChunkLocation(pack, tuple((span.offset, span.length) for span in chunk.spans))
    return found


def decode_index(raw: bytes, pack: str) -> dict[str, ChunkLocation]:
    """What an index object of either layout says; the pack's name tells which. Raises `Refused(PackCorrupt)`."""
    if digest_of_file_pack(pack) is not None:
        return kept_file_locations(pack, decode_file_index(raw, pack))
    return {entry.digest: location_of(pack, entry) for entry in decode_table(raw, pack)}


def encode_pack_list(packs: Iterable[str]) -> bytes:
    """The canonical pack list of a version: its packs' names, sorted, each once."""
    return msgspec.json.encode(sorted(set(packs)))


def decode_pack_list(raw: bytes) -> tuple[str, ...] | None:
    """The names; None where the object is damaged. It is a hint: whoever can't use it reads every index."""
    try:
        packs = decoder(tuple[PackName, ...]).decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return packs if encode_pack_list(packs) == raw else None


async def read_footer(store: BlobStore, key: str, size: int, pack: str) -> tuple[PackEntry, ...]:
    """Return the table at the end of a pack of `size` bytes. Raises `Refused(PackCorrupt)`, `BlobNotFound`."""
    # Lengths are given, for a whole read would raise where damage is to be reported.
    trailing = min(size, TRAILER_BYTES)
    length = footer_bytes(await store.read(key, size - trailing, trailing), size, pack)
    return decode_footer(await store.read(key, size - length, length), size, pack)


async def read_locations(store: BlobStore, tenant: str, pack: str) -> dict[str, ChunkLocation]:
    """Return where each chunk of a pack lies: by its index, or by its footer if the index can't be read.

    A kept file has no footer of ours, whatever its last bytes are. Raises `BlobNotFound` if there is no pack, or no
    index of a kept file; `Refused(PackCorrupt)` if what is there is damaged; `BlobUnavailable`.
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


async def read_chunk(store: BlobStore, key: str, place: ChunkLocation) -> bytes:
    """The chunk's bytes, unverified. Raises as `BlobStore.read`."""
    into = bytearray(place.length)
    await read_chunk_into(store, key, place, memoryview(into))
    return bytes(into)


async def read_chunk_into(store: RangeReader, key: str, place: ChunkLocation, into: memoryview) -> None:
    """Fill all of `into` (`place.length` bytes). Raises as `BlobStore.read_into`; nothing writes to it afterwards."""
    for run in _coalesced(place.spans):
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
    """Spans in order of the file, with their offset in the chunk; those of one list are read at once."""
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
