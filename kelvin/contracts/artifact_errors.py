"""Failures of artifacts: in an upload, in storage, and during computation."""

from dataclasses import dataclass
from typing import Final

from kelvin.contracts.errors import Failure


@dataclass(frozen=True, slots=True)
class ArtifactRejected(Failure):
    """An upload contains something that is not allowed."""

    path: str
    reason: str
    code, status = "artifact_rejected", 422
    template = "{path}: {reason}"
    param_template = "{path}"


@dataclass(frozen=True, slots=True)
class StorageQuotaExceeded(Failure):
    """The tenant's storage quota is too small. All values in bytes.

    `used` counts stored bytes and bytes reserved by the tenant's other open pushes.
    """

    used: int
    asked: int
    limit: int
    code, status = "storage_quota_exceeded", 507
    template = (
        "storage quota: {used} bytes are stored or promised to open pushes, {asked} more are asked for, "
        "the limit is {limit}"
    )


@dataclass(frozen=True, slots=True)
class ChunkCorrupt(Failure):
    """Stored bytes do not match their digest. No byte of the chunk was served."""

    chunk: str
    tier: str
    code, status = "chunk_corrupt", 500
    template = "chunk {chunk} in tier '{tier}' does not match its digest"


@dataclass(frozen=True, slots=True)
class ChunkMissing(Failure):
    """No source holds the chunk."""

    chunk: str
    code, status = "chunk_missing", 500
    template = "chunk {chunk} is in no tier"


@dataclass(frozen=True, slots=True)
class PackCorrupt(Failure):
    """A pack's table is unreadable or contradicts itself, so the chunks in the pack are unknown."""

    pack: str
    reason: str
    code, status = "pack_corrupt", 500
    template = "pack {pack}: {reason}"


@dataclass(frozen=True, slots=True)
class ManifestCorrupt(Failure):
    """A manifest does not decode, or does not match the version that names it."""

    version: str
    reason: str
    code, status = "manifest_corrupt", 500
    template = "manifest of version {version}: {reason}"


@dataclass(frozen=True, slots=True)
class ManifestMissing(Failure):
    """The store has no manifest for a version that exists. A version that never existed is `NotFound`."""

    version: str
    code, status = "manifest_missing", 500
    template = "the manifest of version {version} is missing in the store: run 'kelvin fsck'"


@dataclass(frozen=True, slots=True)
class AttestationInvalid(Failure):
    """An attestation of the version is damaged, forged, or belongs to another version."""

    version: str
    reason: str
    code, status = "attestation_invalid", 500
    template = "an attestation of version {version}: {reason}"


@dataclass(frozen=True, slots=True)
class VersionUnverified(Failure):
    """The installation starts only signed versions, and no trusted key signed this one."""

    version: str
    reason: str
    code, status = "version_unverified", 500
    template = "version {version} is not started: {reason}"


@dataclass(frozen=True, slots=True)
class ProbeFailed(Failure):
    """The known-answer probe did not match. The replica is refused (fail closed)."""

    version: str
    reason: str
    code, status = "probe_failed", 500
    template = "version {version} failed its known-answer probe: {reason}"


@dataclass(frozen=True, slots=True)
class WeightsDamaged(Failure):
    """Weights changed in memory during computation. The replica stops answering from them."""

    version: str
    code, status, retryable, retry_after = "weights_damaged", 503, True, 1.0
    template = "weights of version {version} changed in memory; what was said of this answer can't be relied on"


# Failure codes of a version that can occur while all of its chunks are intact.
NON_CHUNK_CODES: Final = frozenset({AttestationInvalid.code, ProbeFailed.code})
