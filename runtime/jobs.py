"""Seal a draft: prove, before a version exists, what each restore of it will rely on.

Which way of binding is exact, what the model answers, that our own engine answers the same, that its text codec loads.
"""

from typing import Final

import torch

from contracts.artifact_errors import ArtifactRejected, ProbeFailed
from contracts.control import GateFacts, Probe, SealAttestation, SealJob
from contracts.errors import Refused
from runtime.binding import BoundModel, compare
from runtime.engine.core import ModelEngine
from runtime.gate import examine
from runtime.pinned import PinnedFiles
from runtime.policy.blocks import BLOCK_SIZE
from runtime.restore import (
    CONFIG,
    Acquire,
    Weights,
    bind_weights,
    device_of,
    fingerprint_of,
    gate_job,
    pinned_files,
    record_probe,
    required,
)
from runtime.tokenizer import TextCodec

_BLOCKS: Final = 8  # room for the probe and an engine around it


def seal(job: SealJob, acquire: Acquire, device_class: str = "cpu") -> SealAttestation:
    """Raises `Refused`: what is wrong with the draft, in the words of whatever found it."""
    device = device_of(device_class)
    weights = acquire(job.tenant, job.version)
    manifest, files = weights.lease.manifest, pinned_files(weights.lease)
    facts = examine(gate_job(manifest, required(files, CONFIG)))
    _check_tokenizer(files, facts)
    library = bind_weights(weights, files, "library", device)
    probe = record_probe(library, job.version)
    fast = _try_fast(weights, files, device, library)
    _prove_engine(fast or library, facts, probe, job.version, device)
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


def _try_fast(weights: Weights, files: PinnedFiles, device: torch.device, library: BoundModel) -> BoundModel | None:
    """The hand-made module, where it is exactly the library's."""
    try:
        fast = bind_weights(weights, files, "fast", device)
    except Refused:
        return None
    return None if compare(fast.module, library.module) else fast


def _prove_engine(bound: BoundModel, facts: GateFacts, probe: Probe, version: str, device: torch.device) -> None:
    """Each start replays these answers and fails closed: better to learn now that they never match."""
    kv_bytes = _BLOCKS * BLOCK_SIZE * facts.kv_bytes_per_token
    engine = ModelEngine(bound, facts, version=version, kv_bytes=kv_bytes, device=device, probe=probe)
    if (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    if engine.needs_probe:
        raise Refused(ProbeFailed(version, "the engine did not take it"))
