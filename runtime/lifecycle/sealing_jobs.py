"""Gate and seal a draft: verify, before a version exists, everything that its restores will rely on.

A seal records what the model answers, and whether the fast binding is exact. It is written only if our engine gives the
same answers and the text codec loads. `predictor_sealing.py` seals a predictor, which has neither binding nor codec.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.artifacts.runtime_control import GateFacts, GateJob, Probe, SealAttestation, SealJob
from kelvin.contracts.errors import Refused
from runtime.drivers.interface import Engine
from runtime.drivers.native.engine import ModelEngine
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.encoder.served_encoder import EmbeddingCodec
from runtime.lifecycle import predictor_sealing as predictor
from runtime.lifecycle.weights import (
    AcquireLease,
    Weights,
    build_gate_job,
    check_architecture,
    read_pinned_files,
    verify_and_record,
)
from runtime.models.artifact_rejection import public_message
from runtime.models.binding import BoundModel
from runtime.models.pinned_files import PinnedFiles
from runtime.surface.filter_pipeline import FilterClient, check_filters
from runtime.text.tokenizer import TextCodec, check_fast_reader, check_token_rows, check_vocabulary
from runtime.text.tokenizer_file import TOKENIZER
from weightcache.client.device_checksum import checksum_of

log = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_BLOCKS: Final = 8  # KV blocks, enough for the probe


def gate(job: GateJob) -> GateFacts:
    """Return the facts of a model that may be served. Raises `Refused`."""
    with _as_artifact_rejected():
        return check_architecture(job)


def seal(
    job: SealJob, acquire: AcquireLease, *, with_device_checksum: bool = False, filters: FilterClient | None = None
) -> SealAttestation:
    """Return the seal of a draft. Raises `Refused` with the draft's fault, and OSError if a disk or peer failed.

    With `with_device_checksum` the seal includes the checksum that a device must find over the bytes, except a
    predictor's. It takes 0.65 s of a core per GB.
    """
    weights = acquire(job.tenant, job.version)
    manifest, files = weights.lease.manifest, read_pinned_files(weights.lease)
    if manifest.engine.kind != "predict":
        check_filters(files, manifest.engine.kind, filters)
    with _as_artifact_rejected():
        if manifest.engine.kind == "predict":
            return predictor.seal(job.version, weights.lease)
        return _verify_draft(job.version, weights, files, with_device_checksum=with_device_checksum)


@contextmanager
def _as_artifact_rejected() -> Iterator[None]:
    """Translate a library's exception into `Refused(ArtifactRejected)`. An OSError passes: a disk or peer failed."""
    try:
        yield
    except (Refused, OSError):
        raise
    except Exception as error:
        log.exception("a draft can't be judged")
        reason = f"it can't be loaded and computed: {type(error).__name__}: {public_message(error)}"
        raise Refused(ArtifactRejected("model", reason)) from error


def _verify_draft(version: str, weights: Weights, files: PinnedFiles, *, with_device_checksum: bool) -> SealAttestation:
    """Return the seal of a draft, with its known answers. Raises Refused, and what the library raises."""
    manifest = weights.lease.manifest
    if with_device_checksum:
        weights = replace(weights, device_checksum=checksum_of(weights.lease.view(0, manifest.total_bytes)))
    facts = check_architecture(build_gate_job(manifest, files))
    check_fast_reader(files[TOKENIZER])
    if facts.kind == "embed":
        EmbeddingCodec(files, facts.vocab_size)
    else:
        codec = TextCodec(files)
        check_vocabulary(codec, facts.vocab_size)
        check_token_rows(codec, facts.vocab_size)
    bound, attestation = verify_and_record(version, weights, files, facts, _CPU)
    _check_engine_answers(_build_engine(bound, files, facts, attestation.probe, version), version)
    return attestation


def _build_engine(bound: BoundModel, files: PinnedFiles, facts: GateFacts, probe: Probe, version: str) -> Engine:
    if facts.kind == "embed":
        return EncoderEngine(bound, read_recipe(files), facts, version=version, device=_CPU, probe=probe)
    kv_bytes = _BLOCKS * BLOCK_SIZE * facts.kv_bytes_per_token
    return ModelEngine(bound, facts, version=version, kv_bytes=kv_bytes, device=_CPU, probe=probe)


def _check_engine_answers(engine: Engine, version: str) -> None:
    """Raise `Refused` unless the engine reproduces the known answers. Each start would fail if they never matched."""
    if (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    if engine.needs_probe:
        raise Refused(ProbeFailed(version, "the engine did not take it"))
