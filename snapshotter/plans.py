"""An open push, as it is kept on disk between its calls: what was judged, laid out and promised to the client."""

from contracts.control import GateFacts
from contracts.errors import Conflict, Refused
from contracts.manifest import Chunk, Digest, Engine, Limits, Manifest, PinnedFile, Tensor
from contracts.push import Plan, PlannedChunk
from contracts.wire import Wire
from snapshotter.policy.sealing import Sealing, build_manifest, inputs_digest


class PlanRecord(Wire, frozen=True):
    """Immutable once written. `file_digests` are those of the leading chunks, computed here from what was judged."""

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

    @property
    def total_bytes(self) -> int:
        """Length of the linear space."""
        return sum(chunk.length for chunk in self.chunks)

    def answer(self) -> Plan:
        """What the client is told."""
        return Plan(plan_id=self.plan_id, total_bytes=self.total_bytes, chunks=self.chunks, gate=self.gate)

    def check_digests(self, digests: tuple[str, ...]) -> None:
        """One per chunk, and of the pinned files exactly those that were judged. Raises `Refused(Conflict)`."""
        if len(digests) != len(self.chunks):
            raise Refused(Conflict("digests", f"the plan has {len(self.chunks)} chunks, not {len(digests)}"))
        if digests[: len(self.file_digests)] != self.file_digests:
            raise Refused(Conflict("digests", "the small files are not those that were sent with the plan"))
        lengths: dict[str, int] = {}
        for digest, chunk in zip(digests, self.chunks, strict=True):
            if lengths.setdefault(digest, chunk.length) != chunk.length:
                raise Refused(Conflict("digests", f"{digest} is named for chunks of different lengths"))

    def wanted(self, digests: tuple[str, ...]) -> dict[str, int]:
        """Digest and length of each distinct chunk, in order."""
        return {digest: chunk.length for digest, chunk in zip(digests, self.chunks, strict=True)}

    def inputs(self, digests: tuple[str, ...]) -> str:
        """By which an equal push is recognised."""
        return inputs_digest(self._sealing(), self.files, self.tensors, digests)

    def manifest(self, digests: tuple[str, ...]) -> Manifest:
        """The version that these chunks make."""
        chunks = (Chunk(digest, chunk.length) for digest, chunk in zip(digests, self.chunks, strict=True))
        return build_manifest(self._sealing(), self.files, self.tensors, chunks)

    def _sealing(self) -> Sealing:
        return Sealing(self.format, self.chunk_bytes, self.engine, self.limits)
