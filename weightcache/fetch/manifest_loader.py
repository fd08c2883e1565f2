"""Load a version's manifest and check its digest. `attestation_loader.py` loads signed statements about the version."""

from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore
from kelvin.contracts.artifact_errors import ManifestCorrupt, ManifestMissing
from kelvin.contracts.artifacts.manifest import Manifest, decode_manifest
from kelvin.contracts.artifacts.object_keys import draft_key, manifest_key
from kelvin.contracts.errors import Refused
from weightcache.counters import Counters
from weightcache.fetch.fetcher import read_healed
from weightcache.nvme.chunk_files import DocumentKind
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources.policy.healing import Fetched, ReadAttempt, ReadOutcome, SourceRule, Unrecoverable
from weightcache.sources.store_tier import StoreTier

NVME: Final = "nvme"
STORE: Final = "store"
RULES: Final = (SourceRule(NVME, 1), SourceRule(STORE, 2))
_Found = tuple[bytes, Manifest]


class ManifestLoader:
    """Loads manifests from NVMe, else from the store (published manifests, then drafts), and keeps them on NVMe."""

    def __init__(self, store: BlobStore, nvme: NvmeTier, store_tier: StoreTier, counters: Counters) -> None:
        self._store = store
        self._nvme = nvme
        self._store_tier = store_tier
        self._counters = counters

    async def load_manifest(self, tenant: str, version: str) -> _Found:
        """Return the canonical bytes and the manifest. Raises `Refused`: `ManifestMissing` (it was lost, or there never
        was such a version: the registry is not asked), `ManifestCorrupt`, or a retryable failure of the store.
        """
        found: _Found | None = None

        async def read_source(position: int) -> ReadAttempt:
            nonlocal found
            attempt, found = await self._try_tier(RULES[position].tier, tenant, version)
            return attempt

        log_fields = {"tenant": tenant, "version": version}
        match await read_healed(RULES, read_source, "manifest", log_fields, self._counters.healed_manifests):
            case Unrecoverable(decisive):
                raise Refused(decisive.failure or ManifestMissing(version))
            case Fetched(tier):
                assert found is not None
                if tier != NVME:
                    await self._nvme.keep_document(tenant, version, found[0], DocumentKind.MANIFESTS)
                self._store_tier.expect_version(tenant, version, (chunk.digest for chunk in found[1].chunks))
                return found

    async def _try_tier(self, tier: str, tenant: str, version: str) -> tuple[ReadAttempt, _Found | None]:
        """Read once and check. A failure says what is wrong with the copy, or that the tier is unavailable."""
        try:
            raw = await (
                self._try_read_kept(tenant, version) if tier == NVME else self._try_read_stored(tenant, version)
            )
            if raw is None:
                return ReadAttempt(tier, ReadOutcome.ABSENT), None
            return ReadAttempt(tier, ReadOutcome.WHOLE), (raw, _decode_checked(raw, version))
        except OSError:
            outcome, failure = ReadOutcome.UNREADABLE, None
        except Refused as refused:
            if refused.failure.retryable:
                return ReadAttempt(tier, ReadOutcome.AWAY, refused.failure), None
            if not isinstance(refused.failure, ManifestCorrupt):
                raise
            outcome, failure = ReadOutcome.DIGEST, refused.failure
        self._counters.manifest_faults[tier][outcome] += 1
        if tier == NVME:
            await self._nvme.quarantine_document(tenant, version, DocumentKind.MANIFESTS)
        return ReadAttempt(tier, outcome, failure), None

    async def _try_read_kept(self, tenant: str, version: str) -> bytes | None:
        return await self._nvme.try_read_document(tenant, version, DocumentKind.MANIFESTS)

    async def _try_read_stored(self, tenant: str, version: str) -> bytes | None:
        # The third read: published meanwhile, so the draft is gone
        for key_of in (manifest_key, draft_key, manifest_key):
            try:
                return await self._store.read(key_of(tenant, version))
            except BlobNotFound:
                continue
        return None


def _decode_checked(raw: bytes, version: str) -> Manifest:
    manifest = decode_manifest(raw, version)
    lengths: dict[str, int] = {}
    for chunk in manifest.chunks:
        if lengths.setdefault(chunk.digest, chunk.length) != chunk.length:
            raise Refused(ManifestCorrupt(version, f"chunk {chunk.digest} has two lengths"))
    return manifest
