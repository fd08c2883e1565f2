"""A plan and a push of it, as kept on disk between calls: what was judged, laid out and promised to the client.

Both are named by a digest of their content, so a repeated call or push finds what the first one left.
"""

from typing import Final

from blake3 import blake3
from msgspec import structs

from kelvin.blobstore.packs import FileChunk, FileIndex, FileSpan, file_pack
from kelvin.contracts.artifacts.manifest import Chunk, Digest, Engine, Limits, Manifest, PinnedFile, Tensor
from kelvin.contracts.artifacts.push_api import Plan, PlannedChunk
from kelvin.contracts.artifacts.runtime_control import GateFacts
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Conflict, Refused
from kelvin.contracts.wire import Wire, encode
from snapshotter.intake.policy.version_inputs import Sealing, build_manifest, inputs_digest

ID_HEX: Final = 32


class KeptFile(Wire, frozen=True):
    """A pushed file that is stored unchanged. `rest` is the digest of its staged bytes that belong to no chunk."""

    path: str
    size: int
    digest: Digest
    rest: Digest
    rest_bytes: int

    @property
    def pack(self) -> str:
        """Return the name of the pack that the file becomes."""
        return file_pack(self.digest)


class Declaration(Wire, frozen=True):
    """The chunk digests that the client of a push announced. Only these chunks are accepted.

    `kept` is the file that holds all chunks except the first `loose`, if it is not stored yet.
    """

    digests: tuple[Digest, ...]
    lengths: tuple[int, ...]
    loose: int = 0
    kept: KeptFile | None = None

    def added_bytes(self) -> dict[str, int]:
        """Return the sizes by digest of what the push will add: chunks in packs, or the file that holds them."""
        chunks = dict(zip(self.digests, self.lengths, strict=True))
        if self.kept is None:
            return chunks
        return {digest: chunks[digest] for digest in self.digests[: self.loose]} | {self.kept.digest: self.kept.size}


class PlanRecord(Wire, frozen=True):
    """A plan. Immutable. `file_digests` are those of the leading chunks, computed here from the judged files."""

    plan_id: str
    tenant: str
    model: str
    format: int
    chunk_bytes: int
    engine: Engine
    limits: Limits
    files: tuple[PinnedFile, ...]
    tensors: tuple[Tensor, ...]
    chunks: tuple[PlannedChunk, ...]
    file_digests: tuple[Digest, ...]
    gate: GateFacts
    signature: Signature | None = None
    kept: KeptFile | None = None

    def with_id(self, *more_content: object) -> "PlanRecord":
        """Return the plan with the id derived from its content and `more_content`."""
        content = encode((structs.replace(self, plan_id=""), *more_content))
        return structs.replace(self, plan_id=blake3(content).hexdigest()[:ID_HEX])

    @property
    def total_bytes(self) -> int:
        """Return the length of the linear space."""
        return sum(chunk.length for chunk in self.chunks)

    def to_plan(self) -> Plan:
        """Return the plan in the form for the client."""
        return Plan(plan_id=self.plan_id, total_bytes=self.total_bytes, chunks=self.chunks, gate=self.gate)

    def check_digests(self, digests: tuple[str, ...]) -> None:
        """Check for one digest per chunk, and for the judged pinned files. Raises `Refused(Conflict)`."""
        if len(digests) != len(self.chunks):
            raise Refused(Conflict("digests", f"the plan has {len(self.chunks)} chunks, not {len(digests)}"))
        if digests[: len(self.file_digests)] != self.file_digests:
            raise Refused(Conflict("digests", "the small files are not those that were sent with the plan"))
        lengths: dict[str, int] = {}
        for digest, chunk in zip(digests, self.chunks, strict=True):
            if lengths.setdefault(digest, chunk.length) != chunk.length:
                raise Refused(Conflict("digests", f"{digest} is given for chunks of different lengths"))

    def chunk_lengths(self, digests: tuple[str, ...]) -> dict[str, int]:
        """Return the length of each distinct chunk by digest, in order."""
        return {digest: chunk.length for digest, chunk in zip(digests, self.chunks, strict=True)}

    def pinned_chunk_lengths(self, digests: tuple[str, ...]) -> dict[str, int]:
        """Return the lengths of the pinned files' chunks by digest. These lie in no kept file."""
        count = len(self.file_digests)
        return {digest: chunk.length for digest, chunk in zip(digests[:count], self.chunks[:count], strict=True)}

    def digests_staged_by_plan(self) -> set[str]:
        """Return what is staged from the start: pinned files' chunks, and bytes of a kept file that are in no chunk."""
        return {*self.file_digests, *(() if self.kept is None else (self.kept.rest,))}

    def file_index(self, digests: tuple[str, ...]) -> FileIndex:
        """Return where the other chunks lie in the kept file."""
        assert self.kept is not None
        count = len(self.file_digests)
        chunks = zip(digests[count:], self.chunks[count:], strict=True)
        inside = (
            FileChunk(digest, tuple(FileSpan(piece.offset, piece.length) for piece in chunk.pieces))
            for digest, chunk in chunks
        )
        return FileIndex(chunks=tuple(inside), size=self.kept.size)

    def to_declaration(self, digests: tuple[str, ...], has_file_to_write: bool) -> Declaration:
        """Return the declaration of a push of these chunks. `has_file_to_write`: its kept file is not stored yet."""
        lengths = tuple(chunk.length for chunk in self.chunks)
        loose, kept = (len(self.file_digests), self.kept) if has_file_to_write else (0, None)
        return Declaration(digests=digests, lengths=lengths, loose=loose, kept=kept)

    def digest_of_inputs(self, digests: tuple[str, ...]) -> str:
        """Return the digest of the pushed content and its sealing, which the store records next to the version."""
        return inputs_digest(self._sealing(), self.files, self.tensors, digests)

    def manifest(self, digests: tuple[str, ...]) -> Manifest:
        """Return the manifest of the version that these chunks make."""
        chunks = (Chunk(digest, chunk.length) for digest, chunk in zip(digests, self.chunks, strict=True))
        return build_manifest(self._sealing(), self.files, self.tensors, chunks)

    def _sealing(self) -> Sealing:
        return Sealing(self.format, self.chunk_bytes, self.engine, self.limits, self.signature)
