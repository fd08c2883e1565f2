"""What `kelvin push` and the snapshotter say to each other. Headers and small files first, bytes only after that."""

from contracts.control import GateFacts
from contracts.manifest import Digest
from contracts.wire import Wire


class SmallFile(Wire, frozen=True):
    """A file that travels whole in the plan request: config, tokenizer, template."""

    path: str
    content: bytes  # base64 in JSON


class WeightsFile(Wire, frozen=True):
    """A safetensors file; only its header (the length prefix and the JSON) travels now."""

    path: str
    size: int
    header: bytes


class PlanRequest(Wire, frozen=True):
    """`POST /push/v1/plans`."""

    model: str
    small_files: tuple[SmallFile, ...]
    weights: tuple[WeightsFile, ...]
    other_paths: tuple[str, ...] = ()  # everything else that the directory holds, so that a pickle can be refused


class Piece(Wire, frozen=True):
    """`length` bytes at `offset` of a pushed file, then `pad` zero bytes."""

    path: str
    offset: int
    length: int
    pad: int


class PlannedChunk(Wire, frozen=True):
    """A chunk is these pieces in order; the client computes its BLAKE3."""

    length: int
    pieces: tuple[Piece, ...]


class Plan(Wire, frozen=True):
    """What to read, in order. `plan_id` names it in the calls that follow."""

    plan_id: str
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    gate: GateFacts | None


class MissingRequest(Wire, frozen=True):
    """`POST /push/v1/plans/ID/missing`: digests of all chunks of the plan, in order."""

    digests: tuple[Digest, ...]


class Missing(Wire, frozen=True):
    """Which of them this tenant does not have; `PUT /push/v1/plans/ID/chunks/DIGEST` each."""

    digests: tuple[Digest, ...]


class CommitRequest(Wire, frozen=True):
    """`POST /push/v1/plans/ID/commit`, after every missing chunk was accepted."""

    digests: tuple[Digest, ...]


class Committed(Wire, frozen=True):
    """The version exists, was read back, and may serve."""

    model: str
    version: str
    created: bool  # False where the same version was there already
    total_bytes: int
    new_chunks: int
