"""Check that all of a tensorizer file was sent that is stored unchanged, and describe how to put it together again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kelvin.blobstore.packs import FileIndex
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import Digest, Manifest
from kelvin.contracts.artifacts.push_api import PlannedChunk, WeightsFile, WholeFile
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.tensors_index import ContentCheck, IndexEntry


@dataclass(frozen=True, slots=True)
class KeptTensorizer:
    """The kept file. `rest` are its bytes that belong to no tensor, in order."""

    path: str
    size: int
    digest: Digest
    rest: bytes

    @property
    def rest_digest(self) -> str:
        """Return the digest under which `rest` is staged."""
        return blake3(self.rest).hexdigest()


@dataclass(frozen=True, slots=True)
class FilePart:
    """`length` bytes of the file: from `offset` in a chunk, or in the rest if `digest` is None."""

    digest: str | None
    offset: int
    length: int


def check_kept_tensorizer(file: WeightsFile, whole: WholeFile, entries: Sequence[IndexEntry]) -> KeptTensorizer:
    """Check the bytes between the tensors against the index. Raises `Refused(ArtifactRejected)`."""
    expected_bytes = file.size - len(file.header) - sum(entry.tensor.nbytes for entry in entries)
    if len(whole.between) != expected_bytes:
        rule = f"{expected_bytes} bytes of it belong to no tensor, but {len(whole.between)} were sent"
        raise Refused(ArtifactRejected(file.path, rule))
    start = 0
    for entry in entries:
        end = start + entry.tensor.offset - entry.header_offset
        # Check the header against the index. The file's own digest covers the header's hash of the data.
        ContentCheck(file.path, entry, whole.between[start:end])
        start = end
    return KeptTensorizer(file.path, file.size, whole.digest, file.header + whole.between)


def unchunked_spans(index: FileIndex) -> tuple[tuple[int, int], ...]:
    """Return offset and length of the spans that no chunk holds, in order."""
    found: list[tuple[int, int]] = []
    end = 0
    for span in sorted((span.offset, span.length) for chunk in index.chunks for span in chunk.spans):
        if span[0] > end:
            found.append((end, span[0] - end))
        end = sum(span)
    if index.size > end:
        found.append((end, index.size - end))
    return tuple(found)


def has_weights_of(index: FileIndex, manifest: Manifest) -> bool:
    """Return whether the file's chunks are the version's chunks, without those of the pinned files."""
    files_end = max((file.offset + file.size for file in manifest.files), default=0)
    end = file_chunk_count = 0
    while end < files_end:
        end += manifest.chunks[file_chunk_count].length
        file_chunk_count += 1
    return bool(index.chunks) and [chunk.digest for chunk in index.chunks] == [
        chunk.digest for chunk in manifest.chunks[file_chunk_count:]
    ]


def file_parts(chunks: Iterable[PlannedChunk], digests: Iterable[str], size: int) -> Iterator[FilePart]:
    """Yield the parts of the file of `size` bytes from beginning to end. The chunks' pieces must not overlap."""
    placed: list[tuple[int, FilePart]] = []
    for chunk, digest in zip(chunks, digests, strict=True):
        chunk_offset = 0
        for piece in chunk.pieces:
            placed.append((piece.offset, FilePart(digest, chunk_offset, piece.length)))
            chunk_offset += piece.length + piece.pad
    end = rest_offset = 0
    for offset, part in sorted(placed, key=lambda pair: pair[0]):
        if offset > end:
            yield FilePart(None, rest_offset, offset - end)
            rest_offset += offset - end
        yield part
        end = offset + part.length
    if size > end:
        yield FilePart(None, rest_offset, size - end)
