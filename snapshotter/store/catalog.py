"""List the chunks of one tenant, the packs that hold them, and the bytes that these take.

This is read from index objects, which are cached: a pack never changes, so its chunks and its size are read once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound, BlobStore, BlobUnavailable, list_objects
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import ChunkLocation, kept_file_locations, location_of
from kelvin.blobstore.packs import decode_file_index, decode_table, digest_of_file_pack, encode_footer
from kelvin.contracts.artifact_errors import PackCorrupt
from kelvin.contracts.artifacts.object_keys import INDEX, PACKS, index_key, object_name, pack_key
from kelvin.contracts.errors import Refused
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.store.tenant_cache import TenantCache

_MAX_TENANTS: Final = 64


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """A tenant's stored chunks by place, the digests of kept files, and the size of all packs, including unusable
    ones.
    """

    places: Mapping[str, ChunkLocation]
    files: frozenset[str]
    stored_bytes: int

    def find_missing(self, length_by_digest: Mapping[str, int]) -> dict[str, int]:
        """Return those of `length_by_digest` that no pack holds, in order."""
        return {digest: length for digest, length in length_by_digest.items() if not self._holds(digest, length)}

    def __contains__(self, digest: object) -> bool:
        """Return whether it is a chunk in a pack or a kept file."""
        return digest in self.places or digest in self.files

    def _holds(self, digest: str, length: int) -> bool:
        place = self.places.get(digest)
        return place is not None and place.length == length


def find_unstaged(record: PlanRecord, digests: tuple[str, ...], stored: StoredChunks) -> dict[str, int]:
    """Return what a push needs staged before its commit (digest -> length). These are chunks that no pack holds. A kept
    file that is not stored yet needs all of its chunks, because it is written as a whole.
    """
    kept = record.kept
    if kept is None or kept.digest in stored:
        return stored.find_missing(record.chunk_lengths(digests))
    return (
        {kept.rest: kept.rest_bytes}
        | stored.find_missing(record.pinned_chunk_lengths(digests))
        | record.file_index(digests).lengths
    )


@dataclass(frozen=True, slots=True)
class _Pack:
    """A pack. `places` is None if its index is damaged or not there (yet)."""

    places: Mapping[str, ChunkLocation] | None
    size: int


class Catalog:
    """The catalog of all tenants. Each result is a snapshot of the time when it listed the store."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._packs = TenantCache[dict[str, _Pack]](_MAX_TENANTS)

    def __repr__(self) -> str:
        return f"<Catalog tenants={len(self._packs)}>"

    async def stored_chunks(self, tenant: str) -> StoredChunks:
        """Return the chunks of existing packs with a valid index, and the bytes of all packs.

        If a damaged pack was deleted by an operator, its chunks are missing, so the next push sends them again.
        """
        existing, indexed = [
            set(map(object_name, await list_objects(self._store, tenant, kind))) for kind in (PACKS, INDEX)
        ]
        known = self._packs.get(tenant, PACKS) or {}

        async def look(pack: str) -> tuple[str, _Pack]:
            return pack, await self._read_or_reuse(tenant, pack, pack in indexed, known.get(pack))

        packs = dict(await bounded_gather(look, sorted(existing)))
        self._packs.put(tenant, PACKS, packs)
        usable = {name: pack.places for name, pack in packs.items() if pack.places is not None}
        places = {digest: place for chunks in usable.values() for digest, place in chunks.items()}
        files = frozenset(digest for name in usable if (digest := digest_of_file_pack(name)) is not None)
        return StoredChunks(places, files, sum(pack.size for pack in packs.values()))

    async def chunk_places(self, tenant: str) -> Mapping[str, ChunkLocation]:
        """Return the location of each chunk of the tenant."""
        return (await self.stored_chunks(tenant)).places

    async def _read_or_reuse(self, tenant: str, pack: str, is_indexed: bool, known: _Pack | None) -> _Pack:
        if is_indexed and known is not None and known.places is not None:
            return known
        found = await self._try_read_index(tenant, pack) if is_indexed else None
        if found is not None:
            return found
        if known is not None:
            return _Pack(None, known.size)
        try:
            return _Pack(None, (await self._store.stat(pack_key(tenant, pack))).size)
        except BlobNotFound:  # deleted since it was listed
            return _Pack(None, 0)

    async def _try_read_index(self, tenant: str, pack: str) -> _Pack | None:
        """Return the pack by its index; None if the index is damaged, missing or unavailable. A push does without such
        a pack, and `kelvin fsck` reports it. If the whole store is down, the next call fails.
        """
        try:
            raw = await self._store.read(index_key(tenant, pack))
            # The size needs no call of the store: the index has it, or a pack is its chunks and this footer.
            if digest_of_file_pack(pack) is not None:
                index = decode_file_index(raw, pack)
                return _Pack(kept_file_locations(pack, index), index.size)
            entries = decode_table(raw, pack)
        except (BlobNotFound, BlobUnavailable):
            return None
        except Refused as refused:
            if isinstance(refused.failure, PackCorrupt):
                return None
            raise
        end = entries[-1].offset + entries[-1].length if entries else 0
        places = {entry.digest: location_of(pack, entry) for entry in entries}
        return _Pack(places, end + len(encode_footer(entries)))
