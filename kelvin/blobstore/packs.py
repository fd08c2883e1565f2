"""The formats of packs. Pure. Whether a chunk's bytes match its digest is the reader's check.

A pack of ours has chunks at page-aligned offsets, then a footer that says where each one lies:

    chunk bytes ... | table (JSON array of [digest, offset, length]) | table length, 8 bytes LE | magic, 8 bytes

The same table alone is the pack's index object.

A pushed file that is kept as it is, is a pack of a foreign layout. Its index says where chunks lie in it:

    {"chunks": [[digest, [[offset, length], ...]], ...], "size": bytes of the file}

A chunk is the bytes of its spans in order, each followed by zeros up to a page. The file has no footer of ours, so the
index is all that is known of its chunks; the pack is named by the file's digest and `TENSORS_SUFFIX`.
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
MAX_TABLE_BYTES: Final = 64 << 20  # some 700,000 chunks: more is not a table of ours
_NAME: Final = re.compile(rf"([0-9a-f]{{64}}){re.escape(TENSORS_SUFFIX)}")


class PackEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`length` bytes at `offset` of a pack; both are multiples of PAGE, offsets ascend, nothing overlaps."""

    digest: Digest
    offset: Offset
    length: Size


def place(chunks: Iterable[tuple[str, int]]) -> tuple[PackEntry, ...]:
    """Lay (digest, length) pairs out one after another from offset 0."""
    entries: list[PackEntry] = []
    offset = 0
    for digest, length in chunks:
        entries.append(PackEntry(digest, offset, length))
        offset += length
    return tuple(entries)


def encode_table(entries: Sequence[PackEntry]) -> bytes:
    """The canonical table: what the index object holds. Raises ValueError where the entries break a rule."""
    if (fault := _find_fault(entries, None)) is not None:
        raise ValueError(fault)
    return msgspec.json.encode(entries)


def decode_table(raw: bytes, pack: str) -> tuple[PackEntry, ...]:
    """The entries of an index object. `pack` is named in the error. Raises `Refused(PackCorrupt)`."""
    return _decode(raw, None, pack)


def encode_footer(entries: Sequence[PackEntry]) -> bytes:
    """The footer to append after the last chunk. Raises ValueError where the entries break a rule."""
    table = encode_table(entries)
    return table + len(table).to_bytes(8, "little") + MAGIC


def footer_bytes(trailer: bytes, pack_size: int, pack: str) -> int:
    """Length of the footer, from the last `TRAILER_BYTES` of the pack. Raises `Refused(PackCorrupt)`."""
    if len(trailer) < TRAILER_BYTES or trailer[-8:] != MAGIC:
        raise Refused(PackCorrupt(pack, "it does not end in the pack magic"))
    table_bytes = int.from_bytes(trailer[-TRAILER_BYTES:-8], "little")
    if table_bytes > min(MAX_TABLE_BYTES, pack_size - TRAILER_BYTES):
        raise Refused(PackCorrupt(pack, f"its table claims {table_bytes} bytes"))
    return table_bytes + TRAILER_BYTES


def decode_footer(tail: bytes, pack_size: int, pack: str) -> tuple[PackEntry, ...]:
    """The entries, from the pack's last bytes (at least the whole footer). Raises `Refused(PackCorrupt)`."""
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
    """The first rule that is broken, in words."""
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
    """`length` bytes at `offset` of the file, aligned to nothing."""

    offset: Offset
    length: Annotated[int, Meta(ge=1)]


class FileChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk that lies in the file; a digest may occur again at other spans."""

    digest: Digest
    spans: Annotated[tuple[FileSpan, ...], Meta(min_length=1)]

    @property
    def length(self) -> int:
        """Bytes of the chunk, padding included."""
        return sum(pad_to_page(span.length) for span in self.spans)


class FileIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks of one layout, in the order of the linear space. Spans do not overlap."""

    chunks: tuple[FileChunk, ...]
    size: Size

    @property
    def lengths(self) -> dict[str, int]:
        """Digest and length of each distinct chunk."""
        return {chunk.digest: chunk.length for chunk in self.chunks}


def file_pack(digest: str) -> str:
    """The name of the pack that a file of this digest is."""
    return f"{digest}{TENSORS_SUFFIX}"


def digest_of_file_pack(pack: str) -> str | None:
    """The file's digest; None where the name is no file pack's."""
    found = _NAME.fullmatch(pack)
    return None if found is None else found[1]


def encode_file_index(index: FileIndex) -> bytes:
    """The canonical index object. Raises ValueError where a rule is broken."""
    if (fault := _find_index_fault(index)) is not None:
        raise ValueError(fault)
    return msgspec.json.encode(index, order="sorted")


def decode_file_index(raw: bytes, pack: str) -> FileIndex:
    """What an index object says. `pack` is named in the error. Raises `Refused(PackCorrupt)`."""
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
    """The first rule that is broken, in words."""
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
