"""Load and verify a version's attestations, from the store or from the copy in the NVMe tier.

The kept copy is read first, then the store is asked for newer attestations. If the store is unavailable or slow, the
copy is used. So a version whose bytes are all here starts without the store. A faulty object is read twice; then its
kept copy replaces it.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.contracts.artifact_errors import AttestationInvalid, VersionUnverified
from kelvin.contracts.artifacts.attestation import OriginPredicate, SealRecord, read_origin, read_seal
from kelvin.contracts.artifacts.object_keys import ORIGIN_PREFIX, SEAL_PREFIX, attestations_prefix, is_object_key
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decoder
from kelvin.crypto.trust_roots import Trust
from weightcache.counters import Counters
from weightcache.dependencies import ATTESTATIONS
from weightcache.fetch.trust_policy import VerificationPolicy, find_distrust, usable_seals
from weightcache.nvme.chunk_files import DocumentKind
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources.policy.healing import ReadOutcome

log = logging.getLogger(__name__)

REFRESH_S: Final = ATTESTATIONS.timeout_s  # how long a start with a kept copy waits for the store
MAX_READS: Final = 2  # one bad read does not prove a bad object
_DIGEST_HEX: Final = 64

_Objects = dict[str, bytes]  # content by name


@dataclass(frozen=True, slots=True)
class _Found:
    """The valid seals, and the keys that signed the version."""

    seals: tuple[SealRecord, ...]
    signers: tuple[str, ...]


class AttestationLoader:
    """Loads attestations from a store that it only reads. Enforces `policy` on the version's origin."""

    def __init__(
        self, store: BlobStore, nvme: NvmeTier, counters: Counters, trust: Trust, policy: VerificationPolicy
    ) -> None:
        self._store = store
        self._nvme = nvme
        self._counters = counters
        self._trust = trust
        self._policy = policy

    async def load_seals(self, tenant: str, version: str) -> tuple[SealAttestation, ...]:
        """Return the usable seals, sorted by object name. Raises `Refused`: VersionUnverified if the policy forbids the
        start; AttestationInvalid if a seal is damaged or forged and has no kept copy; a retryable failure of the store.
        """
        found = await self._load(tenant, version)
        if self._policy is not VerificationPolicy.OFF:
            self._check_origin(tenant, version, found)
        return usable_seals(self._policy, found.seals, self._trust.name_of)

    def _check_origin(self, tenant: str, version: str, found: _Found) -> None:
        doubt = find_distrust(found.signers, self._trust.is_root)
        if doubt is None:
            return
        self._counters.unverified_versions += 1
        if self._policy is VerificationPolicy.REQUIRE:
            raise Refused(VersionUnverified(version, doubt))
        log.warning("no trusted key signed a version", extra={"tenant": tenant, "version": version, "why": doubt})

    async def _load(self, tenant: str, version: str) -> _Found:
        kept = await self._try_load_kept(tenant, version)
        try:
            async with asyncio.timeout(None if kept is None else REFRESH_S):
                objects, found = await self._load_stored(tenant, version, kept or {})
        except (TimeoutError, Refused) as error:
            is_unavailable = not isinstance(error, Refused) or error.failure.retryable
            if kept is None or not is_unavailable:
                raise
            log.warning("the store is unavailable: using the kept copy", extra={"tenant": tenant, "version": version})
            return _parse_all(version, kept)
        if objects != (kept or {}):
            await self._nvme.keep_document(tenant, version, _pack(objects), DocumentKind.ATTESTATIONS)
        return found

    async def _load_stored(self, tenant: str, version: str, kept: Mapping[str, bytes]) -> tuple[_Objects, _Found]:
        """Return the store's attestations. A kept copy replaces a faulty one; a faulty seal without one is refused."""
        prefix = attestations_prefix(tenant, version)

        async def try_read(name: str) -> bytes | None:
            try:
                return await self._read(prefix + name, name, version)
            except BlobNotFound:
                return None  # deleted since the listing
            except Refused as refused:
                if not isinstance(refused.failure, AttestationInvalid):
                    raise
                fields = {"tenant": tenant, "version": version, "attestation": name, "healed": name in kept}
                log.error("a faulty attestation", extra=fields)
                if name not in kept and name.startswith(SEAL_PREFIX):
                    raise  # without the seal, known answers would not be checked
                return kept.get(name)

        keys = [key async for key in self._store.list(prefix) if is_object_key(key)]
        names = [name for key in keys if (name := key.removeprefix(prefix)).startswith((SEAL_PREFIX, ORIGIN_PREFIX))]
        found = zip(names, await bounded_gather(try_read, names), strict=True)
        objects = {name: raw for name, raw in found if raw is not None}
        return objects, _parse_all(version, objects)

    async def _read(self, key: str, name: str, version: str) -> bytes:
        for attempt in range(MAX_READS):
            raw = await self._store.read(key)
            try:
                _parse(name, raw, version)
            except Refused:
                self._counters.attestation_faults["store"][ReadOutcome.DIGEST] += 1
                if attempt == MAX_READS - 1:
                    raise
            else:
                return raw
        raise AssertionError("unreachable")

    async def _try_load_kept(self, tenant: str, version: str) -> _Objects | None:
        """Return the kept copy after verifying it again, or None if there is none or it is faulty."""
        try:
            raw = await self._nvme.try_read_document(tenant, version, DocumentKind.ATTESTATIONS)
            if raw is None:
                return None
            objects = _unpack(raw)
            _parse_all(version, objects)
        except OSError:
            outcome = ReadOutcome.UNREADABLE
        except (ValueError, Refused):
            outcome = ReadOutcome.DIGEST
        else:
            return objects
        self._counters.attestation_faults["nvme"][outcome] += 1
        log.warning("kept attestations are faulty", extra={"tenant": tenant, "version": version, "kind": outcome})
        await self._nvme.quarantine_document(tenant, version, DocumentKind.ATTESTATIONS)
        return None


def _parse(name: str, raw: bytes, version: str) -> SealRecord | tuple[OriginPredicate, str]:
    return read_seal(raw, version) if name.startswith(SEAL_PREFIX) else read_origin(raw, version)


def _parse_all(version: str, objects: Mapping[str, bytes]) -> _Found:
    seals: list[SealRecord] = []
    signers: list[str] = []
    for name in sorted(objects):
        match _parse(name, objects[name], version):
            case SealRecord() as sealed:
                seals.append(sealed)
            case (_, key_id):
                signers.append(key_id)
    return _Found(tuple(seals), tuple(dict.fromkeys(signers)))


def _pack(objects: _Objects) -> bytes:
    """Return the content of the NVMe tier's file: a digest of the rest, then all objects."""
    body = msgspec.json.encode(objects, order="sorted")
    return blake3(body).hexdigest().encode() + body


def _unpack(raw: bytes) -> _Objects:
    """Return the objects. Raises ValueError."""
    body = raw[_DIGEST_HEX:]
    if blake3(body).hexdigest().encode() != raw[:_DIGEST_HEX]:
        raise ValueError("its bytes do not match their digest")
    return decoder(_Objects).decode(body)
