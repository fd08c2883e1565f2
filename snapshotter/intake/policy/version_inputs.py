"""What a push becomes: its limits and engine, the manifest, and the digest of its inputs, which the format records."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from blake3 import blake3

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import (
    ENGINE_INTERFACE,
    FORMAT,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    Tensor,
)
from kelvin.contracts.artifacts.runtime_control import GateFacts
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import CONFIG
from snapshotter.intake.policy.model_config import EngineDtype

DEFAULT_OUTPUT_TOKENS: Final = 4096


class Sealing(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that decides a version's bytes, apart from what the bytes are."""

    format: int
    chunk_bytes: int
    engine: Engine
    limits: Limits
    signature: Signature | None = None


def choose_limits(max_positions: int) -> Limits:
    """One position is kept for the answer; answers are capped where nobody asked for more.

    Raises `Refused(ArtifactRejected)` where no prompt and answer fit.
    """
    if max_positions < 2:
        raise Refused(ArtifactRejected(CONFIG, f"{max_positions} positions hold no prompt and answer"))
    longest = max_positions - 1
    return Limits(max_input_tokens=longest, max_output_tokens=min(DEFAULT_OUTPUT_TOKENS, longest))


def choose_sealing(
    facts: GateFacts, dtype: EngineDtype, chunk_bytes: int, signature: Signature | None = None
) -> Sealing:
    """The sealing options of a model that passed the gate; `dtype` is what intake read of the directory.

    Raises as `choose_limits`, and where the engine reads another dtype: the manifest would say what nobody computes.
    """
    if facts.dtype != dtype:
        rule = f"its dtype reads as {dtype}, but the engine would compute in {facts.dtype[:20]}: state it in '{CONFIG}'"
        raise Refused(ArtifactRejected(CONFIG, rule))
    engine = Engine(ENGINE_INTERFACE, facts.architecture, dtype, facts.kind)
    # Only what generates keeps positions for an answer: of the others all are the input's, tokens or rows.
    limits = choose_limits(facts.max_positions) if facts.kind == "generate" else Limits(facts.max_positions, 1)
    return Sealing(FORMAT, chunk_bytes, engine, limits, signature)


def build_manifest(
    sealing: Sealing, files: Iterable[PinnedFile], tensors: Iterable[Tensor], chunks: Iterable[Chunk]
) -> Manifest:
    """The manifest of these bytes in this layout."""
    return Manifest(
        format=1,
        engine=sealing.engine,
        limits=sealing.limits,
        chunk_bytes=sealing.chunk_bytes,
        files=tuple(files),
        tensors=tuple(tensors),
        chunks=tuple(chunks),
        signature=sealing.signature,
    )


def inputs_digest(
    sealing: Sealing, files: Sequence[PinnedFile], tensors: Sequence[Tensor], digests: Sequence[str]
) -> str:
    """BLAKE3 over canonical JSON of what was pushed and how it is sealed: known before any sealing job runs."""
    inputs = {"chunks": digests, "files": files, "sealing": sealing, "tensors": tensors}
    return blake3(msgspec.json.encode(inputs, order="sorted")).hexdigest()
