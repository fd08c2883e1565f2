"""Free what no version of a tenant needs: list all objects, let `reachability_policy.py` choose, delete in its order.

One lock makes it safe next to pushes: no pack of the tenant is written meanwhile. Everything that running commits and
open pushes rely on counts as needed. A later commit lists the store again and requests what is missing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore, BlobUnavailable, list_objects
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import read_locations
from kelvin.blobstore.packs import digest_of_file_pack
from kelvin.contracts.artifact_errors import ManifestCorrupt, PackCorrupt
from kelvin.contracts.artifacts.manifest import decode_manifest
from kelvin.contracts.artifacts.object_keys import (
    ATTESTATIONS,
    CONDEMNED,
    DRAFTS,
    INDEX,
    INPUTS,
    MANIFESTS,
    PACK_LISTS,
    PACKS,
    condemned_key,
    object_name,
)
from kelvin.contracts.artifacts.push_api import CollectReport
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.maintenance.reachability_policy import (
    AuxiliaryObject,
    Collection,
    ListedManifest,
    ListedObject,
    ListedPack,
    StoreFacts,
    plan_collection,
)
from snapshotter.push.gate_jobs import GateJobs
from snapshotter.push.publisher import Publisher, RunningCommit
from snapshotter.push.staging import IDLE_S, Staging

log = logging.getLogger(__name__)

MAX_COLLECTIONS: Final = 4  # collections; each waits while a push of its tenant writes packs
_Listed = tuple[str, ListedObject]  # a key and its object


class Collector:
    """The runner of collections, one at a time for each tenant. `clock` is wall clock, as the store's is."""

    def __init__(
        self,
        store: BlobStore,
        publisher: Publisher,
        staging: Staging,
        jobs: GateJobs,
        grace_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._staging = staging
        self._jobs = jobs
        self._grace_s = grace_s
        self._clock = clock
        self._collecting: set[str] = set()  # tenants

    def is_running(self, tenant: str) -> bool:
        """Return whether a collection of this tenant runs."""
        return tenant in self._collecting

    async def collect(self, tenant: str, run: bool) -> CollectReport:
        """Return what is not needed. With `run`, also delete it. A cancelled call can be repeated.

        Raises `Refused`: Overloaded if a collection of the tenant runs, or too many others; ManifestCorrupt or
        ManifestMissing if a needed manifest can't be read (nothing is freed then); Unavailable.
        """
        if tenant in self._collecting:
            raise Refused(Overloaded("this tenant's collections", 1, 10.0))
        if len(self._collecting) >= MAX_COLLECTIONS:
            raise Refused(Overloaded("the list of running collections", MAX_COLLECTIONS, 10.0))
        self._collecting.add(tenant)
        try:
            return await self._collect(tenant, run)
        finally:
            self._collecting.discard(tenant)

    async def _collect(self, tenant: str, run: bool) -> CollectReport:
        async with self._publisher.hold_packs(tenant) as running_commits:
            now_s = self._clock()
            idle_s = max(self._grace_s, IDLE_S)  # keep active pushes even without a grace period
            dropped = await asyncio.to_thread(self._staging.sweep, now_s, idle_s, tenant) if run else 0
            collection = plan_collection(await self._list_store(tenant, running_commits), now_s, self._grace_s)
            if collection.lost:
                log.warning(
                    "chunks of kept versions are in no pack; no pack is freed until a check shows the repair",
                    extra={"tenant": tenant, "chunks": collection.lost},
                )
            if run:
                await self._apply(tenant, collection)
        return CollectReport(
            ran=run,
            grace_s=round(self._grace_s),
            freed=collection.free,
            condemned=collection.condemned,
            versions=collection.versions,
            packs=collection.packs,
            unreferenced_bytes=collection.unreferenced_bytes,
            dropped_pushes=dropped,
            pushes_running=bool(running_commits),
            lost=collection.lost,
        )

    async def _apply(self, tenant: str, collection: Collection) -> None:
        for version in collection.condemn:
            await self._store.put_if_absent(condemned_key(tenant, version), b"")
        for version in collection.unmark:
            await self._store.delete(condemned_key(tenant, version))
        for freed in collection.free:
            await self._store.delete(freed.key)
        nbytes = sum(freed.nbytes for freed in collection.free)
        log.info("collected", extra={"tenant": tenant, "objects": len(collection.free), "bytes": nbytes})

    async def _list_store(self, tenant: str, running_commits: tuple[RunningCommit, ...]) -> StoreFacts:
        """List the store. `running_commits` was read before named versions, so none that ends meanwhile is missed."""
        named = frozenset(await self._jobs.list_named_versions(tenant))
        declared_digests = await asyncio.to_thread(self._staging.declared_digests, tenant)
        attestations = await self._list(tenant, ATTESTATIONS)
        # Read after the listing, so that the push of every listed attestation is included.
        pending_versions = await asyncio.to_thread(self._staging.pending_versions, tenant)
        return StoreFacts(
            tenant=tenant,
            named=named,
            committing=frozenset(each.version for each in running_commits),
            declared_digests=frozenset(declared_digests.union(*(each.chunks for each in running_commits))),
            pending_versions=frozenset(pending_versions),
            manifests=dict(await bounded_gather(self._read_manifest, await self._list(tenant, MANIFESTS))),
            drafts=await self._read_drafts(tenant),
            condemned={object_name(key): found for key, found in await self._list(tenant, CONDEMNED)},
            attestations=tuple(AuxiliaryObject(key, found, key.split("/")[2]) for key, found in attestations),
            pack_lists=tuple(
                AuxiliaryObject(key, found, object_name(key)) for key, found in await self._list(tenant, PACK_LISTS)
            ),
            inputs=tuple(
                side
                for side in await bounded_gather(self._read_inputs, await self._list(tenant, INPUTS))
                if side is not None
            ),
            packs=dict(await bounded_gather(self._read_pack, await self._list(tenant, PACKS))),
            indexes={object_name(key): found for key, found in await self._list(tenant, INDEX)},
        )

    async def _list(self, tenant: str, kind: str) -> list[_Listed]:
        async def stat_object(key: str) -> _Listed | None:
            try:
                stat = await self._store.stat(key)
            except BlobNotFound:
                return None
            return key, ListedObject(stat.size, stat.modified_s)

        found = await bounded_gather(stat_object, await list_objects(self._store, tenant, kind))
        return [listed for listed in found if listed is not None]

    async def _read_drafts(self, tenant: str) -> dict[str, ListedManifest]:
        """Return the drafts, without those that vanished meanwhile. Running commits declare what they need
        themselves.
        """
        listed = await self._list(tenant, DRAFTS)
        drafts = dict(await bounded_gather(self._read_manifest, listed))
        if all(draft.chunks is not None for draft in drafts.values()):
            return drafts
        existing = {object_name(key) for key, _ in await self._list(tenant, DRAFTS)}
        return {name: draft for name, draft in drafts.items() if draft.chunks is not None or name in existing}

    async def _read_manifest(self, listed: _Listed) -> tuple[str, ListedManifest]:
        key, found = listed
        try:
            manifest = decode_manifest(await self._store.read(key), object_name(key))
        except BlobNotFound:
            return object_name(key), ListedManifest(found, None)
        except Refused as refused:
            if isinstance(refused.failure, ManifestCorrupt):
                return object_name(key), ListedManifest(found, None)
            raise
        return object_name(key), ListedManifest(found, frozenset(chunk.digest for chunk in manifest.chunks))

    async def _read_inputs(self, listed: _Listed) -> AuxiliaryObject | None:
        """Return None if the object can't be read now. It stays, and the collection continues."""
        key, found = listed
        try:
            version = (await self._store.read(key)).decode(errors="replace")
        except BlobNotFound:  # deleted since it was listed, so it names no version
            version = ""
        except BlobUnavailable:
            return None
        return AuxiliaryObject(key, found, version)

    async def _read_pack(self, listed: _Listed) -> tuple[str, ListedPack]:
        key, found = listed
        return object_name(key), ListedPack(found, await self._read_chunk_lengths(key))

    async def _read_chunk_lengths(self, key: str) -> dict[str, int] | None:
        """Return the lengths of a pack's chunks, or None if they are unknown."""
        tenant, _, pack = key.split("/")
        try:
            return {digest: place.length for digest, place in (await read_locations(self._store, tenant, pack)).items()}
        except BlobNotFound:
            # A pack without index and footer was deleted since its listing. In a kept file without index, no reader
            # finds a chunk.
            return None if digest_of_file_pack(pack) is None else {}
        except Refused as refused:
            if isinstance(refused.failure, PackCorrupt | Unavailable):
                return None
            raise
