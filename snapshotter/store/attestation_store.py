"""Attestations next to manifests: seals, signed by this installation, and statements of origin, signed by publishers.

There is one seal per engine fingerprint; a good seal is never replaced. Publishers' statements are stored unchanged,
each under its own digest.
"""

from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore, list_objects
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.contracts.artifact_errors import ArtifactRejected, AttestationInvalid, ManifestMissing, ProbeFailed
from kelvin.contracts.artifacts.attestation import MAX_BUNDLE_BYTES, MAX_ORIGIN_BYTES, SEAL_TYPE, read_origin, read_seal
from kelvin.contracts.artifacts.object_keys import (
    ATTESTATIONS,
    BUNDLE_PREFIX,
    ORIGIN_PREFIX,
    SEAL_PREFIX,
    attestation_key,
    attestations_prefix,
    bundle_key,
    is_object_key,
    manifest_key,
    object_name,
    origin_key,
)
from kelvin.contracts.artifacts.push_api import AttestationEntry, AttestRequest
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import CapacityExceeded, Failure, NotFound, Refused
from kelvin.crypto.signing_keys import Signer
from kelvin.crypto.trust_roots import Trust
from snapshotter.store.pack_check import ensure_object
from snapshotter.store.tenant_cache import TenantCache

MAX_ORIGINS: Final = 32  # publishers' statements about one version
_MAX_TENANTS: Final = 64


async def explain_absence(store: BlobStore, tenant: str, version: str) -> Failure:
    """Return why there is no manifest: `ManifestMissing` if a seal shows that the version was made, else `NotFound`. A
    publisher's statement shows nothing, because it is stored while the push is open. Raises `Refused` if the store does
    not answer.
    """
    async for key in store.list(attestations_prefix(tenant, version) + SEAL_PREFIX):
        if is_object_key(key):
            return ManifestMissing(version)
    return NotFound("version", version)


class AttestationStore:
    """The attestations in one store, and the installation's key. Every method raises `Refused` if the store fails."""

    def __init__(self, store: BlobStore, signer: Signer, trust: Trust) -> None:
        self._store = store
        self._signer = signer
        self._trust = trust
        self._known_sizes = TenantCache[Mapping[str, int]](_MAX_TENANTS)

    async def is_sealed(self, tenant: str, version: str) -> bool:
        """Return whether the version has a usable seal by a trusted key."""
        prefix = attestations_prefix(tenant, version)
        async for key in self._store.list(prefix + SEAL_PREFIX):
            if is_object_key(key) and await self._is_good_seal(key, version):
                return True
        return False

    async def store_seal(self, tenant: str, version: str, seal: SealAttestation) -> None:
        """Sign a seal and store it. Raises ProbeFailed if it is for another version."""
        if seal.version != version:
            raise Refused(ProbeFailed(version, "the sealing job answered for another version"))
        raw = self._signer.attest(version, SEAL_TYPE, seal)
        await self._ensure_stored(attestation_key(tenant, version, seal.fingerprint), raw, version)

    async def add_seal(self, tenant: str, seal: SealAttestation) -> None:
        """Store a replica's seal, unless its fingerprint has a good one. Raises NotFound, ManifestMissing."""
        try:
            await self._store.stat(manifest_key(tenant, seal.version))
        except BlobNotFound:
            raise Refused(await explain_absence(self._store, tenant, seal.version)) from None
        if not await self._is_good_seal(attestation_key(tenant, seal.version, seal.fingerprint), seal.version):
            await self.store_seal(tenant, seal.version, seal)

    async def publisher_objects(self, tenant: str) -> Mapping[str, int]:
        """Return publishers' statements and bundles for all versions: sizes by key. Sizes are cached, since names are
        digests.
        """
        known = self._known_sizes.get(tenant, ATTESTATIONS) or {}

        async def stat_size(key: str) -> tuple[str, int] | None:
            try:
                return key, known[key] if key in known else (await self._store.stat(key)).size
            except BlobNotFound:  # deleted since it was listed
                return None

        named = await list_objects(self._store, tenant, ATTESTATIONS)
        keys = [key for key in named if object_name(key).startswith((BUNDLE_PREFIX, ORIGIN_PREFIX))]
        sizes = dict([found for found in await bounded_gather(stat_size, keys) if found is not None])
        self._known_sizes.put(tenant, ATTESTATIONS, sizes)
        return sizes

    def statement_objects(self, tenant: str, version: str, request: AttestRequest) -> dict[str, bytes]:
        """Return the objects of a publisher's statement about a version that is being pushed: its bundle, then the
        statement. Raises ArtifactRejected if it is not signed, is about another version, or is too large.
        """
        if len(request.envelope) > MAX_ORIGIN_BYTES or len(request.bundle or b"") > MAX_BUNDLE_BYTES:
            rule = f"it has more than {MAX_ORIGIN_BYTES} bytes, or its bundle more than {MAX_BUNDLE_BYTES}"
            raise Refused(ArtifactRejected("attestation", rule))
        try:
            predicate, _ = read_origin(request.envelope, version)
        except Refused as refused:
            if not isinstance(refused.failure, AttestationInvalid):
                raise
            raise Refused(ArtifactRejected("attestation", refused.failure.reason)) from refused
        if predicate.bundle != (None if request.bundle is None else blake3(request.bundle).hexdigest()):
            raise Refused(ArtifactRejected("attestation", "the bundle is not the one that it names"))
        bundle = {} if request.bundle is None else {bundle_key(tenant, version, request.bundle): request.bundle}
        return bundle | {origin_key(tenant, version, request.envelope): request.envelope}

    async def add_statement(self, tenant: str, version: str, objects: Mapping[str, bytes]) -> None:
        """Store the objects of `statement_objects`. Raises CapacityExceeded."""
        existing = [found async for found in self._store.list(attestations_prefix(tenant, version) + ORIGIN_PREFIX)]
        if len(existing) >= MAX_ORIGINS and not objects.keys() & set(existing):
            raise Refused(CapacityExceeded("statements about a version", len(existing) + 1, MAX_ORIGINS))
        for key, raw in objects.items():
            await self._ensure_stored(key, raw, version)

    async def list_entries(self, tenant: str, version: str) -> tuple[AttestationEntry, ...]:
        """Return a version's attestations with their verdicts, in order of names."""
        found: list[AttestationEntry] = []
        bundles: set[str] = set()
        prefix = attestations_prefix(tenant, version)
        for key in sorted([key async for key in self._store.list(prefix) if is_object_key(key)], reverse=True):
            try:
                raw = await self._store.read(key)
            except BlobNotFound:
                continue
            entry = self.judge(tenant, version, key.removeprefix(prefix), raw, bundles)
            found.append(entry)
        return tuple(reversed(found))

    def judge(self, tenant: str, version: str, name: str, raw: bytes, bundles: set[str]) -> AttestationEntry:
        """Return the verdict on one object. `bundles` collects digests that statements name: judge bundles last."""
        fault = key_id = None
        try:
            if name.startswith(ORIGIN_PREFIX):
                predicate, key_id = read_origin(raw, version)
                bundles |= {predicate.bundle} if predicate.bundle else set()
                expected = origin_key(tenant, version, raw)
            elif name.startswith(BUNDLE_PREFIX):
                fault = None if blake3(raw).hexdigest() in bundles else "no statement of a publisher names it"
                expected = bundle_key(tenant, version, raw)
            else:
                sealed = read_seal(raw, version)
                key_id = sealed.key_id
                fault = None if key_id is not None else "it is not signed"
                expected = attestation_key(tenant, version, sealed.seal.fingerprint)
            if fault is None and expected != attestations_prefix(tenant, version) + name:
                fault = "its name is not that of its fingerprint or digest"
        except Refused as refused:
            if not isinstance(refused.failure, AttestationInvalid):
                raise
            fault = refused.failure.reason
        trusted_as = None if key_id is None or fault is not None else self._trust.name_of(key_id)
        return AttestationEntry(name=name, content=raw, key_id=key_id, trusted_as=trusted_as, fault=fault)

    async def _is_good_seal(self, key: str, version: str) -> bool:
        try:
            key_id = read_seal(await self._store.read(key), version).key_id
        except BlobNotFound:
            return False
        except Refused as refused:
            if isinstance(refused.failure, AttestationInvalid):
                return False
            raise
        return key_id is not None and self._trust.name_of(key_id) is not None

    async def _ensure_stored(self, key: str, raw: bytes, version: str) -> None:
        lost = AttestationInvalid(version, "the store does not return what was written")
        await ensure_object(self._store, key, raw, lost)
