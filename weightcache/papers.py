"""What is known of a version besides its weights: the manifest, checked against its digest, and its attestations."""

import logging
from typing import Final

import msgspec

from blobstore.store import BlobNotFound, BlobStore
from contracts.artifact_errors import ManifestCorrupt
from contracts.control import SealAttestation
from contracts.errors import NotFound, Refused
from contracts.manifest import Manifest, decode_manifest
from weightcache.counters import Counters
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import Arrived, Ask, Lost, Outcome, Rule, Trial, choose_step
from weightcache.telling import tell_faults

log = logging.getLogger(__name__)

NVME: Final = "nvme"
STORE: Final = "store"
RULES: Final = (Rule(NVME, 1), Rule(STORE, 2))
ATTESTATION_READS: Final = 2  # a bad read is not yet a bad object


class Papers:
    """Manifests come from NVMe, else from the store (published first, then drafts) and are kept on NVMe."""

    def __init__(self, store: BlobStore, nvme: NvmeTier, counters: Counters) -> None:
        self._store = store
        self._nvme = nvme
        self._counters = counters

    async def manifest(self, tenant: str, version: str) -> tuple[bytes, Manifest]:
        """The canonical bytes and what they say. Raises `Refused` with `NotFound` or `ManifestCorrupt`."""
        trials: list[Trial] = []
        found: tuple[bytes, Manifest] | None = None
        while True:
            match choose_step(RULES, trials):
                case Ask(position):
                    trial, found = await self._try(RULES[position].tier, tenant, version)
                    trials.append(trial)
                case Arrived(tier):
                    assert found is not None
                    tell_faults(
                        "manifest",
                        {"tenant": tenant, "version": version},
                        trials,
                        self._counters.healed_manifests,
                        tier,
                    )
                    if tier != NVME:
                        await self._nvme.keep_paper(tenant, version, found[0])
                    return found
                case Lost(decisive):
                    tell_faults(
                        "manifest",
                        {"tenant": tenant, "version": version},
                        trials,
                        self._counters.healed_manifests,
                        None,
                    )
                    raise Refused(decisive.failure or NotFound("version", version))

    async def attestations(self, tenant: str, version: str) -> tuple[SealAttestation, ...]:
        """Those found now, by key. One that doesn't decode or speaks of another version is refused, not skipped."""
        keys = [key async for key in self._store.list(f"{tenant}/attestations/{version}/seal-")]
        return tuple([await self._attestation(key, version) for key in keys])

    async def _attestation(self, key: str, version: str) -> SealAttestation:
        for _ in range(ATTESTATION_READS - 1):
            try:
                return _decode(await self._store.read(key), version)
            except Refused as refused:
                if not isinstance(refused.failure, ManifestCorrupt):
                    raise
        return _decode(await self._store.read(key), version)

    async def _try(self, tier: str, tenant: str, version: str) -> tuple[Trial, tuple[bytes, Manifest] | None]:
        """One read, checked. A failure says what is wrong with the copy, or that the tier is away."""
        try:
            raw = await (self._kept(tenant, version) if tier == NVME else self._stored(tenant, version))
            if raw is None:
                return Trial(tier, Outcome.ABSENT), None
            return Trial(tier, Outcome.WHOLE), (raw, _checked(raw, version))
        except OSError:
            outcome, failure = Outcome.UNREADABLE, None
        except Refused as refused:
            if refused.failure.retryable:
                return Trial(tier, Outcome.AWAY, refused.failure), None
            if not isinstance(refused.failure, ManifestCorrupt):
                raise
            outcome, failure = Outcome.DIGEST, refused.failure
        self._counters.manifest_faults[tier][outcome] += 1
        if tier == NVME:
            await self._nvme.quarantine_paper(tenant, version)
        return Trial(tier, outcome, failure), None

    async def _kept(self, tenant: str, version: str) -> bytes | None:
        return await self._nvme.try_read_paper(tenant, version)

    async def _stored(self, tenant: str, version: str) -> bytes | None:
        for kind in ("manifests", "drafts", "manifests"):  # published meanwhile, its draft is gone
            try:
                return await self._store.read(f"{tenant}/{kind}/{version}")
            except BlobNotFound:
                continue
        return None


def _checked(raw: bytes, version: str) -> Manifest:
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
