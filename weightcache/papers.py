"""What is known of a version besides its weights: the manifest, checked against its digest, and its attestations."""

import msgspec

from blobstore.store import BlobNotFound, BlobStore
from contracts.artifact_errors import ManifestCorrupt
from contracts.control import SealAttestation
from contracts.errors import NotFound, Refused
from contracts.manifest import Manifest, decode_manifest
from weightcache.nvme import NvmeTier


class Papers:
    """Manifests come from NVMe, else from the store (published first, then drafts) and are kept on NVMe."""

    def __init__(self, store: BlobStore, nvme: NvmeTier) -> None:
        self._store = store
        self._nvme = nvme

    async def manifest(self, tenant: str, version: str) -> tuple[bytes, Manifest]:
        """The canonical bytes and what they say. Raises `Refused` with `NotFound` or `ManifestCorrupt`."""
        raw = await self._nvme.try_read_paper(tenant, version)
        if raw is not None:
            try:
                return raw, self._checked(raw, version)
            except Refused:
                await self._nvme.quarantine_paper(tenant, version)
                raise
        raw = await self._stored(tenant, version)
        manifest = self._checked(raw, version)
        await self._nvme.keep_paper(tenant, version, raw)
        return raw, manifest

    async def attestations(self, tenant: str, version: str) -> tuple[SealAttestation, ...]:
        """Those found now, by key. One that doesn't decode or speaks of another version is refused, not skipped."""
        keys = [key async for key in self._store.list(f"{tenant}/attestations/{version}/seal-")]
        return tuple([_decode(await self._store.read(key), version) for key in keys])

    async def _stored(self, tenant: str, version: str) -> bytes:
        for kind in ("manifests", "drafts", "manifests"):  # published meanwhile, its draft is gone
            try:
                return await self._store.read(f"{tenant}/{kind}/{version}")
            except BlobNotFound:
                continue
        raise Refused(NotFound("version", version))

    def _checked(self, raw: bytes, version: str) -> Manifest:
        manifest = decode_manifest(raw, version)
        lengths: dict[str, int] = {}
        for chunk in manifest.chunks:
            if lengths.setdefault(chunk.digest, chunk.length) != chunk.length:
                raise Refused(ManifestCorrupt(version, f"chunk {chunk.digest} has two lengths"))
        return manifest


def _decode(raw: bytes, version: str) -> SealAttestation:
    try:
        attestation = msgspec.json.decode(raw, type=SealAttestation)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(ManifestCorrupt(version, f"an attestation does not decode: {error}")) from error
    if attestation.version != version:
        raise Refused(ManifestCorrupt(version, "an attestation speaks of another version"))
    return attestation
