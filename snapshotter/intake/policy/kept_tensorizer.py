"""A tensorizer file that is kept as it is: what was sent of it must be all of it, and how it is put together again."""

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
    """The file, by its path; `rest` are the bytes of it that belong to no tensor, in order."""

    path: str
    size: int
    digest: Digest
    rest: bytes

    @property
    def rest_digest(self) -> str:
        """By which `rest` is staged."""
        return blake3(self.rest).hexdigest()


@dataclass(frozen=True, slots=True)
class FilePart:
    """`length` bytes of the file: from `offset` on of a chunk, or of the rest where `digest` is None."""

    digest: str | None
    offset: int
    length: int


def check_kept_tensorizer(file: WeightsFile, whole: WholeFile, entries: Sequence[IndexEntry]) -> KeptTensorizer:
    """Hold what lies between the tensors against the index. Raises `Refused(ArtifactRejected)`."""
    want = file.size - len(file.header) - sum(entry.tensor.nbytes for entry in entries)
    if len(whole.between) != want:
        rule = f"{want} bytes of it belong to no tensor, but {len(whole.between)} were sent"
        raise Refused(ArtifactRejected(file.path, rule))
    at = 0
    for entry in entries:
        end = at + entry.tensor.offset - entry.header_offset
        # What the header says of the place; that its hash is right of the data, the file's own digest says.
        ContentCheck(file.path, entry, whole.between[at:end])
        at = end
    return KeptTensorizer(file.path, file.size, whole.digest, file.header + whole.between)


def unchunked_spans(index: FileIndex) -> tuple[tuple[int, int], ...]:
    """Offset and length of what no chunk holds, in order."""
    found: list[tuple[int, int]] = []
    end = 0
    for span in sorted((span.offset, span.length) for chunk in index.chunks for span in chunk.spans):
        if span[0] > end:
            found.append((end, span[0] - end))
        end = sum(span)
    if index.size > end:
        found.append((end, index.size - end))
    return tuple(found)


def holds_weights_of(index: FileIndex, manifest: Manifest) -> bool:
    """Whether the chunks of the file are those of the version, but for the pinned files' own."""
    files_end = max((file.offset + file.size for file in manifest.files), default=0)
    end = loose = 0
    while end < files_end:
        end += manifest.chunks[loose].length
        loose += 1
    return bool(index.chunks) and [chunk.digest for chunk in index.chunks] == [
        chunk.digest for chunk in manifest.chunks[loose:]
    ]


def file_parts(chunks: Iterable[PlannedChunk], digests: Iterable[str], size: int) -> Iterator[FilePart]:
    """The file of `size` bytes from its beginning to its end; the chunks' pieces lie in it and do not overlap."""
    placed: list[tuple[int, FilePart]] = []
    for chunk, digest in zip(chunks, digests, strict=True):
        at = 0
        for piece in chunk.pieces:
            placed.append((piece.offset, FilePart(digest, at, piece.length)))
            at += piece.length + piece.pad
    end = rest = 0
    for offset, part in sorted(placed, key=lambda pair: pair[0]):
        if offset > end:
            yield FilePart(None, rest, offset - end)
            rest += offset - end
        yield part
        end = offset + part.length
    if size > end:
        yield FilePart(None, rest, size - end)
