"""Versions on their way out: a manifest, and chunks that were compared with their digests, for who exports them."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from blobstore.store import BlobNotFound, BlobShort, BlobStore
from contracts.artifact_errors import ChunkCorrupt, ChunkMissing
from contracts.errors import NotFound, Refused
from contracts.keys import manifest_key, pack_key
from contracts.manifest import decode_manifest
from snapshotter.catalog import Catalog, Place
from snapshotter.turns import Turns

AT_ONCE: Final = 16
_TENANTS_KEPT: Final = 16
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Exports:
    """Reads of one tenant's objects at a time, of none of another's. Chunks are held in memory while they travel."""

    def __init__(self, store: BlobStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._places: OrderedDict[str, Mapping[str, Place]] = OrderedDict()
        self.turns = Turns("the list of chunks being exported", AT_ONCE)

    def __repr__(self) -> str:
        return f"<Exports tenants={len(self._places)}>"

    async def manifest(self, tenant: str, version: str) -> bytes:
        """The canonical manifest. Raises `Refused`: NotFound, ManifestCorrupt."""
        if _DIGEST.fullmatch(version) is None:
            raise Refused(NotFound("version", version[:80]))
        try:
            raw = await self._store.read(manifest_key(tenant, version))
        except BlobNotFound:
            raise Refused(NotFound("version", version)) from None
        decode_manifest(raw, version)
        return raw

    async def chunk(self, tenant: str, digest: str) -> bytes:
        """A chunk of the tenant. Raises `Refused`: NotFound for no digest, ChunkMissing, ChunkCorrupt."""
        if _DIGEST.fullmatch(digest) is None:
            raise Refused(NotFound("chunk", digest[:80]))
        data = await self._read(tenant, self._places.get(tenant, {}).get(digest))
        if data is None:  # packed since, or its pack was collected and it lies elsewhere
            self._places[tenant] = await self._catalog.places(tenant)
            self._places.move_to_end(tenant)
            while len(self._places) > _TENANTS_KEPT:
                self._places.popitem(last=False)
            data = await self._read(tenant, self._places[tenant].get(digest))
        if data is None:
            raise Refused(ChunkMissing(digest))
        if await asyncio.to_thread(lambda: blake3(data).hexdigest()) != digest:
            raise Refused(ChunkCorrupt(digest, "store"))
        return data

    async def _read(self, tenant: str, place: Place | None) -> bytes | None:
        if place is None:
            return None
        try:
            return await self._store.read(pack_key(tenant, place.pack), place.offset, place.length)
        except (BlobNotFound, BlobShort):
            return None
