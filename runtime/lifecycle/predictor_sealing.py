"""Verify a predictor: build its session from verified bytes and record its known answers."""

import logging
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected, ManifestCorrupt, ProbeFailed
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.runtime_control import Fingerprint, GateFacts, Probe, SealAttestation
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode
from runtime.lifecycle.weights import Lease, find_attestation, read_pinned_files, require_file
from runtime.predictor import probe as known_answers
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.onnx_session import MODEL, OnnxSession, fingerprint

log = logging.getLogger(__name__)

# Every start reads the known answers, and no quota counts them. The snapshotter accepts seals up to 32 MiB.
MAX_PROBE_BYTES: Final = 24 << 20


def require_signature(manifest: Manifest, version: str) -> Signature:
    """Return the manifest's signature. Raises `Refused(ManifestCorrupt)` if it has none."""
    if manifest.signature is None:
        raise Refused(ManifestCorrupt(version, "a predictor must have a signature"))
    return manifest.signature


def open_session(lease: Lease, version: str, threads: int) -> OnnxSession:
    """Return a session over the lease's model file. Raises `Refused`."""
    return OnnxSession(
        require_file(read_pinned_files(lease), MODEL), require_signature(lease.manifest, version), threads
    )


def seal(version: str, lease: Lease) -> SealAttestation:
    """Return the seal of a draft. Raises `Refused` with what is wrong with the draft."""
    manifest = lease.manifest
    signature = require_signature(manifest, version)
    session = open_session(lease, version, 1)
    try:
        probe = known_answers.record(session, signature)
    except ValueError as error:
        raise Refused(ArtifactRejected(MODEL, str(error))) from error
    if (nbytes := len(encode(probe))) > MAX_PROBE_BYTES:
        rule = f"its known answers take {nbytes} bytes; the limit is {MAX_PROBE_BYTES}"
        raise Refused(ArtifactRejected(MODEL, f"{rule}: use rows with fewer values or shorter texts"))
    engine = PredictorEngine(
        session, signature, version=version, max_rows=manifest.limits.max_input_tokens, probe=probe
    )
    if (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    return _build_seal(version, manifest, probe)


def load_known_answers(version: str, lease: Lease, session: OnnxSession) -> tuple[Probe, SealAttestation | None]:
    """Return the known answers and, if they were recorded just now, the seal to store.

    Answers that were attested for this fingerprint are used. Otherwise they are recorded here, before any request is
    served. Raises `Refused(ProbeFailed)` if that fails.
    """
    if (attestation := find_attestation(lease, _fingerprint(lease.manifest))) is not None:
        return attestation.probe, None
    log.warning("no attestation for this fingerprint: recording known answers", extra={"version": version})
    try:
        probe = known_answers.record(session, require_signature(lease.manifest, version))
    except ValueError as error:
        raise Refused(ProbeFailed(version, str(error))) from error
    return probe, _build_seal(version, lease.manifest, probe)


def _build_seal(version: str, manifest: Manifest, probe: Probe) -> SealAttestation:
    return SealAttestation(
        version=version,
        fingerprint=_fingerprint(manifest),
        threads=1,
        fast_bind=False,
        probe=probe,
        gate=_facts(manifest),
    )


def _fingerprint(manifest: Manifest) -> Fingerprint:
    return Fingerprint(torch=fingerprint(), dtype=manifest.engine.dtype, device_class="cpu")


def _facts(manifest: Manifest) -> GateFacts:
    return GateFacts(
        architecture=manifest.engine.architecture,
        dtype=manifest.engine.dtype,
        layers=0,
        kv_heads=0,
        head_dim=0,
        value_dim=0,
        vocab_size=0,
        max_positions=manifest.limits.max_input_tokens,
        kv_bytes_per_token=0,
        first_use=(),
        kind="predict",
    )
