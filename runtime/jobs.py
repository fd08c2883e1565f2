"""Gate and seal a draft: prove, before a version exists, what each restore of it will rely on.

Which way of binding is exact, what the model answers, that our own engine answers the same, that its text codec loads.
"""

from typing import Final

import torch

from contracts.artifact_errors import ArtifactRejected, ProbeFailed
from contracts.control import GateFacts, GateJob, Probe, SealAttestation, SealJob
from contracts.errors import Refused
from runtime import decoder
from runtime.binding import BoundModel
from runtime.encoder import sealing as encoder
from runtime.encoder.codec import EmbeddingCodec
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.engine.core import ModelEngine
from runtime.engine.interface import Engine
from runtime.pinned import PinnedFiles
from runtime.policy.blocks import BLOCK_SIZE
from runtime.predictor import sealing as predictor
from runtime.tokenizer import TextCodec
from runtime.weights import (
    Acquire,
    bind_fast_if_exact,
    bind_weights,
    device_of,
    fingerprint_of,
    gate_job,
    pinned_files,
)

_BLOCKS: Final = 8  # room for the probe and an engine around it


def gate(job: GateJob) -> GateFacts:
    """May this model be served? What says how embeddings are made is there for what embeds alone. Raises `Refused`."""
    return (encoder.WAYS if job.recipe else decoder.WAYS).examine(job)


def seal(job: SealJob, acquire: Acquire, device_class: str = "cpu") -> SealAttestation:
    """Raises `Refused`: what is wrong with the draft, in the words of whatever found it."""
    device = device_of(device_class)
    weights = acquire(job.tenant, job.version)
    manifest, files = weights.lease.manifest, pinned_files(weights.lease)
    if manifest.engine.kind == "predict":
        return predictor.seal(job.version, weights.lease)
    ways = encoder.WAYS if manifest.engine.kind == "embed" else decoder.WAYS
    facts = ways.examine(gate_job(manifest, files))
    if facts.kind == "embed":
        EmbeddingCodec(files, facts.vocab_size)
    else:
        _check_tokenizer(files, facts)
    library = bind_weights(weights, files, "library", device)
    probe = ways.record(library, files, job.version)
    fast = bind_fast_if_exact(weights, files, device, library)
    _prove_engine(_engine(fast or library, files, facts, probe, job.version, device), job.version)
    return SealAttestation(
        version=job.version,
        fingerprint=fingerprint_of(manifest, device),
        threads=torch.get_num_threads(),
        fast_bind=fast is not None,
        probe=probe,
        gate=facts,
    )


def _check_tokenizer(files: PinnedFiles, facts: GateFacts) -> None:
    """It loads, and no text has a token that the model lacks."""
    codec = TextCodec(files)
    if codec.vocab_size > facts.vocab_size:
        reason = f"has {codec.vocab_size} tokens, the model {facts.vocab_size}"
        raise Refused(ArtifactRejected("tokenizer.json", reason))


def _engine(
    bound: BoundModel, files: PinnedFiles, facts: GateFacts, probe: Probe, version: str, device: torch.device
) -> Engine:
    if facts.kind == "embed":
        return EncoderEngine(bound, read_recipe(files), facts, version=version, device=device, probe=probe)
    kv_bytes = _BLOCKS * BLOCK_SIZE * facts.kv_bytes_per_token
    return ModelEngine(bound, facts, version=version, kv_bytes=kv_bytes, device=device, probe=probe)


def _prove_engine(engine: Engine, version: str) -> None:
    """Each start replays these answers and fails closed: better to learn now that they never match."""
    if (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    if engine.needs_probe:
        raise Refused(ProbeFailed(version, "the engine did not take it"))
