"""Where each byte of a version lies: a pure function of names, sizes and first-use order: equal models are equal.

The linear space holds pinned files in path order, then tensors in the order of their first use, each on a PAGE
boundary with zeros behind it. Cutting: files have chunks of their own; a tensor of `chunk_bytes` or more begins a
chunk, so that what changed before it does not shift it. Which file a tensor came from is known to the pieces alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Digest, PinnedFile, Tensor, pad_to_page
from kelvin.contracts.artifacts.push_api import Piece, PlannedChunk, SmallFile
from snapshotter.intake.policy.safetensors_header import SourceTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """`chunks` cover the linear space without a gap; the first `file_chunks` of them hold the pinned files."""

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
    """By the place of the name in `first_use`; names that are not in it come last, sorted."""
    place: dict[str, int] = {}
    for name in first_use:
        place.setdefault(name, len(place))
    return tuple(sorted(tensors, key=lambda tensor: (place.get(tensor.name, len(place)), tensor.name)))


def lay_out(
    files: Iterable[tuple[SmallFile, Digest]],
    tensors: Iterable[SourceTensor],
    first_use: Sequence[str],
    chunk_bytes: int,
) -> Layout:
    """The layout of pinned files (with their digests) and tensors. `chunk_bytes` is a multiple of PAGE."""
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError(f"chunk_bytes={chunk_bytes}: must be a multiple of {PAGE_BYTES}")
    at = 0
    pinned: list[PinnedFile] = []
    for file, digest in sorted(files, key=lambda pair: pair[0].path):
        pinned.append(PinnedFile(file.path, at, len(file.content), digest))
        at += pad_to_page(len(file.content))
    placed: list[Tensor] = []
    ordered = first_use_order(tensors, first_use)
    for tensor in ordered:
        placed.append(Tensor(tensor.name, tensor.dtype, tensor.shape, at))
        at += pad_to_page(tensor.nbytes)
    file_chunks = tuple(_cut([_Item(file.path, 0, file.size) for file in pinned], chunk_bytes))
    weights = _cut([_Item(tensor.path, tensor.offset, tensor.nbytes) for tensor in ordered], chunk_bytes)
    return Layout(tuple(pinned), tuple(placed), (*file_chunks, *weights), len(file_chunks))


def _cut(items: Iterable[_Item], chunk_bytes: int) -> Iterator[PlannedChunk]:
    """Chunks of one segment, in order."""
    pieces: list[Piece] = []
    length = 0
    for item in items:
        done = 0
        if item.nbytes >= chunk_bytes and pieces:
            yield PlannedChunk(length=length, pieces=tuple(pieces))
            pieces, length = [], 0
        while done < item.nbytes:
            take = min(item.nbytes - done, chunk_bytes - length)
            # Only an item's last piece can end off a page: chunks and items begin on one.
            pad = pad_to_page(take) - take
            pieces.append(Piece(path=item.path, offset=item.offset + done, length=take, pad=pad))
            length += take + pad
            done += take
            if length == chunk_bytes:
                yield PlannedChunk(length=length, pieces=tuple(pieces))
                pieces, length = [], 0
    if pieces:
        yield PlannedChunk(length=length, pieces=tuple(pieces))


def assemble(chunk: PlannedChunk, contents: dict[str, bytes]) -> bytes:
    """The chunk's bytes, out of whole files held in memory."""
    parts = []
    for piece in chunk.pieces:
        parts += [contents[piece.path][piece.offset : piece.offset + piece.length], bytes(piece.pad)]
    return b"".join(parts)


def pads_are_zero(chunk: PlannedChunk, data: bytes | memoryview) -> bool:
    """Whether nothing hides in the padding: equal models would otherwise differ in bytes that nobody reads."""
    at = 0
    for piece in chunk.pieces:
        at += piece.length
        if bytes(data[at : at + piece.pad]).strip(b"\0"):
            return False
        at += piece.pad
    return True


def group_into_packs(chunks: Iterable[tuple[str, int]], pack_bytes: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Split (digest, length) pairs, in order, into groups of at most `pack_bytes` (a larger chunk stands alone).

    The chunks of a group travel together in a pack, so that disks see long reads.
    """
    held: list[tuple[str, int]] = []
    total = 0
    for digest, length in chunks:
        if held and total + length > pack_bytes:
            yield tuple(held)
            held, total = [], 0
        held.append((digest, length))
        total += length
    if held:
        yield tuple(held)
