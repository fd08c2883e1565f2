"""Export versions: read a manifest, and chunks that are verified against their digests."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound, BlobShort, BlobStore, BlobUnavailable
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import ChunkLocation, read_chunk
from kelvin.blobstore.packs import file_pack
from kelvin.contracts.artifact_errors import ChunkCorrupt, ManifestMissing
from kelvin.contracts.artifacts.manifest import decode_manifest
from kelvin.contracts.artifacts.object_keys import PACKS, manifest_key, pack_key
from kelvin.contracts.artifacts.push_api import Original
from kelvin.contracts.errors import NotFound, Refused
from kelvin.contracts.names import is_digest
from snapshotter.intake.policy.kept_tensorizer import has_weights_of, unchunked_spans
from snapshotter.intake.tenant_call_limits import BodyBudget, CallLimiter
from snapshotter.store.attestation_store import explain_absence
from snapshotter.store.catalog import Catalog
from snapshotter.store.pack_check import has_digest, try_file_index
from snapshotter.store.tenant_cache import TenantCache

MAX_CALLS: Final = 16
BUDGET_BYTES: Final = 768 << 20  # for responses in transfer, half of it per tenant
_MAX_TENANTS: Final = 16


def check_version(version: str) -> None:
    """Raise `Refused(NotFound)` if the name is no digest, since no version has such a name."""
    if not is_digest(version):
        raise Refused(NotFound("version", version[:80]))


class Exports:
    """Reads of a tenant's own objects. Chunks are in memory while they are sent."""

    def __init__(
        self, store: BlobStore, catalog: Catalog, list_named_versions: Callable[[str], Awaitable[Iterable[str]]]
    ) -> None:
        self._store = store
        self._list_named_versions = list_named_versions
        self._catalog = catalog
        self._places = TenantCache[Mapping[str, ChunkLocation]](_MAX_TENANTS)
        self.call_limiter = CallLimiter("the list of chunks being exported", MAX_CALLS)
        self.body_budget = BodyBudget("the memory for what is exported", BUDGET_BYTES)

    async def manifest(self, tenant: str, version: str) -> bytes:
        """Return the canonical manifest. Raises `Refused`: NotFound, ManifestMissing, ManifestCorrupt, Unavailable."""
        check_version(version)
        try:
            raw = await self._store.read(manifest_key(tenant, version))
        except BlobNotFound:
            # A lost store, or one older than the registry, has no seal of the version either, so check the names.
            is_named = version in await self._list_named_versions(tenant)
            absence = ManifestMissing(version) if is_named else await explain_absence(self._store, tenant, version)
            raise Refused(absence) from None
        decode_manifest(raw, version)
        return raw

    async def chunk(self, tenant: str, digest: str) -> bytes:
        """Return a chunk. Raises `Refused`: NotFound (also for other tenants' chunks), ChunkCorrupt, Unavailable."""
        if not is_digest(digest):
            raise Refused(NotFound("chunk", digest[:80]))
        data = await self._read(tenant, (self._places.get(tenant, PACKS) or {}).get(digest))
        if data is not None and await has_digest(data, digest):
            return data
        # The cache is stale: a new pack has the chunk, its pack was collected, or an index was repaired.
        places = await self._catalog.chunk_places(tenant)
        self._places.put(tenant, PACKS, places)
        data = await self._read(tenant, places.get(digest))
        if data is None:
            raise Refused(NotFound("chunk", digest))
        if not await has_digest(data, digest):
            raise Refused(ChunkCorrupt(digest, "store"))
        return data

    async def original(self, tenant: str, version: str) -> Original:
        """Return the file that the version was pushed as, without the chunks. The client verifies its digest. Raises
        `Refused(NotFound)` if no such file is kept.
        """
        manifest = decode_manifest(await self.manifest(tenant, version), version)
        unavailable: BlobUnavailable | None = None
        for digest in sorted((await self._catalog.stored_chunks(tenant)).files):
            try:
                index = await try_file_index(self._store, tenant, file_pack(digest))
            except BlobUnavailable as error:  # it may belong to another version
                index, unavailable = None, error
            if index is None or not has_weights_of(index, manifest):
                continue
            key = pack_key(tenant, file_pack(digest))
            try:
                rest = await bounded_gather(partial(self._read_span, key), unchunked_spans(index))
            except (BlobNotFound, BlobShort):
                continue
            spans = tuple(tuple((span.offset, span.length) for span in chunk.spans) for chunk in index.chunks)
            return Original(digest=digest, size=index.size, spans=spans, rest=b"".join(rest))
        if unavailable is not None:
            raise unavailable
        raise Refused(NotFound("the original of version", version))

    async def _read_span(self, key: str, span: tuple[int, int]) -> bytes:
        return await self._store.read(key, *span)

    async def _read(self, tenant: str, place: ChunkLocation | None) -> bytes | None:
        if place is None:
            return None
        try:
            return await read_chunk(self._store, pack_key(tenant, place.pack), place)
        except (BlobNotFound, BlobShort):
            return None
