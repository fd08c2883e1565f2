"""Compute where each byte of a version lies. Pure, from names, sizes and first-use order, so equal models are equal.

The linear space holds pinned files in path order, then tensors in the order of their first use, each on a page boundary
and padded with zeros. Files and tensors have separate chunks. A tensor of `chunk_bytes` or more begins a chunk, so that
a change before it does not shift it. Only the pieces know which file a tensor came from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Digest, PinnedFile, Tensor, pad_to_page
from kelvin.contracts.artifacts.push_api import Piece, PlannedChunk, SmallFile
from snapshotter.intake.policy.safetensors_header import SourceTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout. `chunks` cover the linear space without a gap; the first `file_chunks` hold the pinned files."""

    files: tuple[PinnedFile, ...]
    tensors: tuple[Tensor, ...]
    chunks: tuple[PlannedChunk, ...]
    file_chunks: int


@dataclass(frozen=True, slots=True)
class _Item:
    path: str
    offset: int  # in the file
    nbytes: int


def first_use_order(tensors: Iterable[SourceTensor], first_use: Sequence[str]) -> tuple[SourceTensor, ...]:
    """Return the tensors in the order of `first_use`. Tensors that are not in it come last, sorted by name."""
    rank_by_name: dict[str, int] = {}
    for name in first_use:
        rank_by_name.setdefault(name, len(rank_by_name))
    return tuple(sorted(tensors, key=lambda tensor: (rank_by_name.get(tensor.name, len(rank_by_name)), tensor.name)))


def lay_out(
    files: Iterable[tuple[SmallFile, Digest]],
    tensors: Iterable[SourceTensor],
    first_use: Sequence[str],
    chunk_bytes: int,
) -> Layout:
    """Return the layout of pinned files (with digests) and tensors. `chunk_bytes` is a multiple of PAGE_BYTES."""
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError(f"chunk_bytes={chunk_bytes}: must be a multiple of {PAGE_BYTES}")
    offset = 0
    pinned: list[PinnedFile] = []
    for file, digest in sorted(files, key=lambda pair: pair[0].path):
        pinned.append(PinnedFile(file.path, offset, len(file.content), digest))
        offset += pad_to_page(len(file.content))
    placed: list[Tensor] = []
    ordered = first_use_order(tensors, first_use)
    for tensor in ordered:
        placed.append(Tensor(tensor.name, tensor.dtype, tensor.shape, offset))
        offset += pad_to_page(tensor.nbytes)
    file_chunks = tuple(_cut_into_chunks([_Item(file.path, 0, file.size) for file in pinned], chunk_bytes))
    weights = _cut_into_chunks([_Item(tensor.path, tensor.offset, tensor.nbytes) for tensor in ordered], chunk_bytes)
    return Layout(tuple(pinned), tuple(placed), (*file_chunks, *weights), len(file_chunks))


def _cut_into_chunks(items: Iterable[_Item], chunk_bytes: int) -> Iterator[PlannedChunk]:
    """Yield the chunks of one segment in order."""
    pieces: list[Piece] = []
    length = 0
    for item in items:
        done_bytes = 0
        if item.nbytes >= chunk_bytes and pieces:
            yield PlannedChunk(length=length, pieces=tuple(pieces))
            pieces, length = [], 0
        while done_bytes < item.nbytes:
            piece_bytes = min(item.nbytes - done_bytes, chunk_bytes - length)
            # Chunks and items begin on a page boundary, so only an item's last piece can end elsewhere.
            pad = pad_to_page(piece_bytes) - piece_bytes
            pieces.append(Piece(path=item.path, offset=item.offset + done_bytes, length=piece_bytes, pad=pad))
            length += piece_bytes + pad
            done_bytes += piece_bytes
            if length == chunk_bytes:
                yield PlannedChunk(length=length, pieces=tuple(pieces))
                pieces, length = [], 0
    if pieces:
        yield PlannedChunk(length=length, pieces=tuple(pieces))


def assemble(chunk: PlannedChunk, contents: dict[str, bytes]) -> bytes:
    """Return the chunk's bytes from whole files in memory."""
    parts = []
    for piece in chunk.pieces:
        parts += [contents[piece.path][piece.offset : piece.offset + piece.length], bytes(piece.pad)]
    return b"".join(parts)


def pads_are_zero(chunk: PlannedChunk, data: bytes | memoryview) -> bool:
    """Return whether the padding is zero. Otherwise equal models could differ in bytes that are never read."""
    offset = 0
    for piece in chunk.pieces:
        offset += piece.length
        if bytes(data[offset : offset + piece.pad]).strip(b"\0"):
            return False
        offset += piece.pad
    return True


def group_into_packs(chunks: Iterable[tuple[str, int]], pack_bytes: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Split (digest, length) pairs, in order, into groups of at most `pack_bytes`. A larger chunk stands alone.

    The chunks of a group are stored in one pack, so that disks see long reads.
    """
    group: list[tuple[str, int]] = []
    group_bytes = 0
    for digest, length in chunks:
        if group and group_bytes + length > pack_bytes:
            yield tuple(group)
            group, group_bytes = [], 0
        group.append((digest, length))
        group_bytes += length
    if group:
        yield tuple(group)
