"""The formats of packs. Pure. Readers check whether a chunk's bytes match its digest.

A pack of Kelvin's layout has chunks at page-aligned offsets, then a footer that locates them:

    chunk bytes ... | table (JSON array of [digest, offset, length]) | table length, 8 bytes LE | magic, 8 bytes

The pack's index object is the same table alone.

A pushed file that is kept unchanged is a pack of a foreign layout. Its index locates the chunks in it.

    {"chunks": [[digest, [[offset, length], ...]], ...], "size": bytes of the file}

A chunk is the bytes of its spans in order, each followed by zeros up to a page. The file has no footer of Kelvin's, so
only the index knows its chunks. The pack's name is the file's digest and `TENSORS_SUFFIX`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.manifest import MAX_FAULT, PAGE_BYTES, Digest, Offset, Size, pad_to_page
from kelvin.contracts.artifacts.object_keys import TENSORS_SUFFIX
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decoder

MAGIC: Final = b"KELVPK01"
TRAILER_BYTES: Final = 16  # table length and magic
MAX_TABLE_BYTES: Final = 64 << 20  # about 700,000 chunks: a larger table is not one of Kelvin's
_NAME: Final = re.compile(rf"([0-9a-f]{{64}}){re.escape(TENSORS_SUFFIX)}")


class PackEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk of `length` bytes at `offset` of a pack. Both are multiples of PAGE_BYTES; chunks don't overlap."""

    digest: Digest
    offset: Offset
    length: Size


def assign_offsets(chunks: Iterable[tuple[str, int]]) -> tuple[PackEntry, ...]:
    """Return entries for (digest, length) pairs, placed one after another from offset 0."""
    entries: list[PackEntry] = []
    offset = 0
    for digest, length in chunks:
        entries.append(PackEntry(digest, offset, length))
        offset += length
    return tuple(entries)


def encode_table(entries: Sequence[PackEntry]) -> bytes:
    """Return the canonical table, the content of an index object. Raises ValueError if the entries break a rule."""
    if (fault := _find_fault(entries, None)) is not None:
        raise ValueError(fault)
    return msgspec.json.encode(entries)


def decode_table(raw: bytes, pack: str) -> tuple[PackEntry, ...]:
    """Return the entries of an index object. Raises `Refused(PackCorrupt)`, which names `pack`."""
    return _decode(raw, None, pack)


def encode_footer(entries: Sequence[PackEntry]) -> bytes:
    """Return the footer to append after the last chunk. Raises ValueError if the entries break a rule."""
    table = encode_table(entries)
    return table + len(table).to_bytes(8, "little") + MAGIC


def footer_bytes(trailer: bytes, pack_size: int, pack: str) -> int:
    """Return the length of the footer, from the last `TRAILER_BYTES` of the pack. Raises `Refused(PackCorrupt)`."""
    if len(trailer) < TRAILER_BYTES or trailer[-8:] != MAGIC:
        raise Refused(PackCorrupt(pack, "it does not end in the pack magic"))
    table_bytes = int.from_bytes(trailer[-TRAILER_BYTES:-8], "little")
    if table_bytes > min(MAX_TABLE_BYTES, pack_size - TRAILER_BYTES):
        raise Refused(PackCorrupt(pack, f"its table claims {table_bytes} bytes"))
    return table_bytes + TRAILER_BYTES


def decode_footer(tail: bytes, pack_size: int, pack: str) -> tuple[PackEntry, ...]:
    """Return the entries. `tail` is the end of the pack, at least the whole footer. Raises `Refused(PackCorrupt)`."""
    length = footer_bytes(tail, pack_size, pack)
    if len(tail) < length:
        raise Refused(PackCorrupt(pack, f"its footer of {length} bytes was cut"))
    return _decode(tail[len(tail) - length : -TRAILER_BYTES], pack_size - length, pack)


def _decode(table: bytes, chunks_end: int | None, pack: str) -> tuple[PackEntry, ...]:
    try:
        entries = decoder(tuple[PackEntry, ...]).decode(table)
    except BadJson as error:
        raise Refused(PackCorrupt(pack, str(error))) from error
    fault = _find_fault(entries, chunks_end)
    if fault is None and msgspec.json.encode(entries) != table:
        fault = "its table is not in canonical form"
    if fault is not None:
        raise Refused(PackCorrupt(pack, fault))
    return entries


def _find_fault(entries: Sequence[PackEntry], chunks_end: int | None) -> str | None:
    """Return a sentence about the first broken rule, or None."""
    end = 0
    seen: set[str] = set()
    for entry in entries:
        if entry.offset % PAGE_BYTES or entry.length % PAGE_BYTES or entry.length == 0:
            return f"chunk {entry.digest} lies at {entry.offset}+{entry.length}, not on {PAGE_BYTES}-byte boundaries"
        if entry.offset < end:
            return f"chunk {entry.digest} overlaps its predecessor"
        if entry.digest in seen:
            return f"chunk {entry.digest} occurs twice"
        seen.add(entry.digest)
        end = entry.offset + entry.length
    if chunks_end is not None and end > chunks_end:
        return f"its chunks end at {end}, after its footer begins"
    return None


class FileSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`length` bytes at `offset` of the file, without alignment."""

    offset: Offset
    length: Annotated[int, Meta(ge=1)]


class FileChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk in the file. The same digest may occur again with other spans."""

    digest: Digest
    spans: Annotated[tuple[FileSpan, ...], Meta(min_length=1)]

    @property
    def length(self) -> int:
        """Return the bytes of the chunk, padding included."""
        return sum(pad_to_page(span.length) for span in self.spans)


class FileIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks of one layout, in the order of the linear space. Spans do not overlap."""

    chunks: tuple[FileChunk, ...]
    size: Size

    @property
    def lengths(self) -> dict[str, int]:
        """Return the length of each distinct chunk by digest."""
        return {chunk.digest: chunk.length for chunk in self.chunks}


def file_pack(digest: str) -> str:
    """Return the pack name of a file with this digest."""
    return f"{digest}{TENSORS_SUFFIX}"


def digest_of_file_pack(pack: str) -> str | None:
    """Return the file's digest, or None if the name is not that of a file pack."""
    found = _NAME.fullmatch(pack)
    return None if found is None else found[1]


def encode_file_index(index: FileIndex) -> bytes:
    """Return the canonical index object. Raises ValueError if a rule is broken."""
    if (fault := _find_index_fault(index)) is not None:
        raise ValueError(fault)
    return msgspec.json.encode(index, order="sorted")


def decode_file_index(raw: bytes, pack: str) -> FileIndex:
    """Return the content of an index object. Raises `Refused(PackCorrupt)`, which names `pack`."""
    try:
        index = decoder(FileIndex).decode(raw)
    except BadJson as error:
        raise Refused(PackCorrupt(pack, str(error))) from error
    fault = _find_index_fault(index)
    if fault is None and msgspec.json.encode(index, order="sorted") != raw:
        fault = "its index is not in canonical form"
    if fault is not None:
        raise Refused(PackCorrupt(pack, fault[:MAX_FAULT]))
    return index


def _find_index_fault(index: FileIndex) -> str | None:
    """Return a sentence about the first broken rule, or None."""
    lengths: dict[str, int] = {}
    for chunk in index.chunks:
        if lengths.setdefault(chunk.digest, chunk.length) != chunk.length:
            return f"chunk {chunk.digest} has two lengths"
    end = 0
    for span, digest in sorted(
        ((span.offset, span.length), chunk.digest) for chunk in index.chunks for span in chunk.spans
    ):
        if span[0] < end:
            return f"chunk {digest} overlaps another at {span[0]}"
        end = sum(span)
    if end > index.size:
        return f"its chunks end at {end}, but the file has {index.size} bytes"
    return None
