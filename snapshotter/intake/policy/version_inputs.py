"""Derive a version from a push: limits, engine, manifest, and the digest of its inputs, which the format records."""

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
    """Everything that decides a version's bytes, apart from the pushed content."""

    format: int
    chunk_bytes: int
    engine: Engine
    limits: Limits
    signature: Signature | None = None


def choose_limits(max_positions: int) -> Limits:
    """Return the limits. One position is reserved for the response, whose default length is capped.

    Raises `Refused(ArtifactRejected)` if a prompt and a response do not fit.
    """
    if max_positions < 2:
        raise Refused(ArtifactRejected(CONFIG, f"{max_positions} positions hold no prompt and answer"))
    longest = max_positions - 1
    return Limits(max_input_tokens=longest, max_output_tokens=min(DEFAULT_OUTPUT_TOKENS, longest))


def choose_sealing(
    facts: GateFacts, dtype: EngineDtype, chunk_bytes: int, signature: Signature | None = None
) -> Sealing:
    """Return the sealing options of a model that passed the gate. `dtype` is the one that intake read.

    Raises as `choose_limits` does, and if the engine would compute in another dtype than the manifest would state.
    """
    if facts.dtype != dtype:
        rule = f"its dtype reads as {dtype}, but the engine would compute in {facts.dtype[:20]}: state it in '{CONFIG}'"
        raise Refused(ArtifactRejected(CONFIG, rule))
    engine = Engine(ENGINE_INTERFACE, facts.architecture, dtype, facts.kind)
    # Only a decoder reserves positions for a response. For other kinds all are input: tokens or rows.
    limits = choose_limits(facts.max_positions) if facts.kind == "generate" else Limits(facts.max_positions, 1)
    return Sealing(FORMAT, chunk_bytes, engine, limits, signature)


def build_manifest(
    sealing: Sealing, files: Iterable[PinnedFile], tensors: Iterable[Tensor], chunks: Iterable[Chunk]
) -> Manifest:
    """Return the manifest of these bytes in this layout."""
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
    """Return BLAKE3 over canonical JSON of the pushed content and its sealing, known before any sealing job."""
    inputs = {"chunks": digests, "files": files, "sealing": sealing, "tensors": tensors}
    return blake3(msgspec.json.encode(inputs, order="sorted")).hexdigest()
