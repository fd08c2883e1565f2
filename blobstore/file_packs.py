"""A pushed file that is kept as it is, as a pack of a foreign layout: its index says where chunks lie in it. Pure.

    {"chunks": [[digest, [[offset, length], ...]], ...], "size": bytes of the file}

A chunk is the bytes of its spans in order, each followed by zeros up to a page. The file has no footer of ours, so the
index is all that is known of its chunks; the pack is named by the file's digest and `TENSORS_SUFFIX`.
"""

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from contracts.artifact_errors import PackCorrupt
from contracts.errors import Refused
from contracts.keys import TENSORS_SUFFIX
from contracts.manifest import MAX_FAULT, Digest, Offset, Size, padded
from contracts.wire import BadJson, decoder

_NAME: Final = re.compile(rf"([0-9a-f]{{64}}){re.escape(TENSORS_SUFFIX)}")


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
        return sum(padded(span.length) for span in self.spans)


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
    if (fault := _find_fault(index)) is not None:
        raise ValueError(fault)
    return msgspec.json.encode(index, order="sorted")


def decode_file_index(raw: bytes, pack: str) -> FileIndex:
    """What an index object says. `pack` is named in the error. Raises `Refused(PackCorrupt)`."""
    try:
        index = decoder(FileIndex).decode(raw)
    except BadJson as error:
        raise Refused(PackCorrupt(pack, str(error)[:MAX_FAULT])) from error
    fault = _find_fault(index)
    if fault is None and msgspec.json.encode(index, order="sorted") != raw:
        fault = "its index is not in canonical form"
    if fault is not None:
        raise Refused(PackCorrupt(pack, fault[:MAX_FAULT]))
    return index


def _find_fault(index: FileIndex) -> str | None:
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
