"""The store tier: read chunks as ranges of packs, including files that are kept unchanged.

Each pack of a tenant has an index object that locates its chunks. Indexes are read lazily: first those in a version's
pack list, then all others. If an index is missing, damaged or unavailable, the pack's footer replaces it. A pack
without either is skipped, and harms only the versions that need it. If one copy of a chunk is gone, unavailable or
wrong, the chunk is read from the next pack that holds it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound, BlobShort, BlobStore, BlobUnavailable, list_objects
from kelvin.blobstore.bounded_gather import bounded_gather
from kelvin.blobstore.chunk_locations import (
    ChunkLocation,
    RangeReader,
    decode_pack_list,
    read_chunk_into,
    read_locations,
)
from kelvin.blobstore.packs import digest_of_file_pack
from kelvin.contracts.artifacts.object_keys import PACKS, object_name, pack_key, pack_list_key
from kelvin.contracts.errors import Refused
from weightcache.sources.policy.fair_read_queue import ReadLimit
from weightcache.sources.policy.healing import ReadOutcome
from weightcache.sources.source import UNLIMITED_READ_SLOT, ReadSlot
from weightcache.sources.store_ranges import StoreRanges

log = logging.getLogger(__name__)

MAX_EXPECTED_VERSIONS: Final = 64
MAX_TENANTS: Final = 256  # tenants whose tables are kept; other tables are read again when needed
INDEX_BATCH: Final = 64  # indexes that are read before the next search for the chunk
MAX_UNAVAILABLE_PACKS: Final = 8  # unavailable packs; above that the store itself counts as unavailable


@dataclass(slots=True)
class _PackTable:
    """The known packs of one tenant. A chunk's first place is tried first."""

    chunks: dict[str, tuple[ChunkLocation, ...]] = field(default_factory=dict)
    known_packs: set[str] = field(default_factory=set)
    unread_packs: list[str] = field(default_factory=list)  # listed packs whose index was not read yet
    unavailable_packs: dict[str, BlobUnavailable] = field(default_factory=dict)  # since the last listing
    wrong_copies: dict[str, ChunkLocation] = field(default_factory=dict)  # by chunk; another copy is searched
    expected_versions: OrderedDict[str, frozenset[str]] = field(default_factory=OrderedDict)  # version -> its chunks
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, digest: str, place: ChunkLocation) -> None:
        known = self.chunks.get(digest, ())
        if place not in known:
            self.chunks[digest] = (*known, place)

    def put_last(self, digest: str, place: ChunkLocation) -> None:
        """Try this place after the others from now on."""
        known = self.chunks.get(digest, ())
        if place in known:
            self.chunks[digest] = (*(each for each in known if each != place), place)

    def forget_packs(self, packs: set[str]) -> None:
        self.known_packs -= packs
        if packs:
            remaining = {
                digest: tuple(place for place in places if place.pack not in packs)
                for digest, places in self.chunks.items()
            }
            self.chunks = {digest: places for digest, places in remaining.items() if places}


class StoreTier:
    """A `Source` over a `BlobStore`. `ranges` reads the chunks."""

    tier = "store"
    attempts = 2  # wrong bytes may come from a cache or connection on the way, and another pack may have the chunk

    def __init__(self, store: BlobStore, ranges: StoreRanges) -> None:
        self._store = store
        self._ranges = ranges
        self.read_limit: ReadLimit = ranges.window
        self._tables: OrderedDict[str, _PackTable] = OrderedDict()  # the most recently used is last
        self.unreadable_packs = 0

    def __repr__(self) -> str:
        return f"<StoreTier tenants={len(self._tables)} {self._store!r}>"

    def may_have(self, tenant: str, digest: str) -> bool:
        """Return True: another machine may have stored the chunk a moment ago."""
        return True

    def expect_version(self, tenant: str, version: str, digests: Iterable[str]) -> None:
        """Announce fetches of this version's chunks. Its pack list then tells which indexes to read."""
        expected = self._table(tenant).expected_versions
        expected[version] = frozenset(digests)
        expected.move_to_end(version)
        while len(expected) > MAX_EXPECTED_VERSIONS:
            expected.popitem(last=False)

    async def fetch(
        self, tenant: str, digest: str, into: memoryview, slot: ReadSlot = UNLIMITED_READ_SLOT
    ) -> ReadOutcome:
        """Fetch as `Source.fetch` does. Raises BlobUnavailable, which is a `Refused(Unavailable)`."""
        reader = self._ranges.reader_for(slot)
        unavailable: BlobUnavailable | None = None
        places = await self._locate(tenant, digest, stale=())
        try:
            outcome = await self._read_first(tenant, digest, places, into, reader)
        except BlobUnavailable as error:
            outcome, unavailable = ReadOutcome.ABSENT, error
        # The packs were collected or are unavailable: other packs may have the chunk.
        if outcome is ReadOutcome.ABSENT and places:
            fresh = await self._locate(tenant, digest, stale=places)
            for place in places:
                self._table(tenant).put_last(digest, place)  # `quarantine` doubts the first place
            outcome = await self._read_first(tenant, digest, fresh, into, reader)
        if outcome is ReadOutcome.ABSENT and unavailable is not None:
            raise unavailable
        return outcome

    async def find_length(self, tenant: str, digest: str) -> int | None:
        """Return the chunk's length from the packs' tables; None if no pack has it. Raises `Refused`."""
        places = await self._locate(tenant, digest, stale=())
        return places[0].length if places else None

    async def quarantine(self, tenant: str, digest: str) -> None:
        """Read another pack's copy before this one from now on. The store itself is never changed here. Only the
        snapshotter writes the store, and its objects never change; `kelvin fsck` tells how to repair it.
        """
        table = self._table(tenant)
        if known := table.chunks.get(digest):
            table.wrong_copies[digest] = known[0]

    def _table(self, tenant: str) -> _PackTable:
        table = self._tables.setdefault(tenant, _PackTable())
        self._tables.move_to_end(tenant)
        while len(self._tables) > MAX_TENANTS:
            self._tables.popitem(last=False)
        return table

    async def _read_first(
        self, tenant: str, digest: str, places: Iterable[ChunkLocation], into: memoryview, reader: RangeReader
    ) -> ReadOutcome:
        """Read from the first place that has a copy. Raises BlobUnavailable if none has, and some did not answer."""
        unavailable: BlobUnavailable | None = None
        for place in places:
            try:
                outcome = await self._read(tenant, place, into, reader)
            except BlobUnavailable as error:
                outcome, unavailable = ReadOutcome.AWAY, error
            if outcome not in (ReadOutcome.ABSENT, ReadOutcome.AWAY):
                return outcome
            self._table(tenant).put_last(digest, place)
        if unavailable is not None:
            raise unavailable
        return ReadOutcome.ABSENT

    async def _read(self, tenant: str, place: ChunkLocation, into: memoryview, reader: RangeReader) -> ReadOutcome:
        if place.length != into.nbytes:
            return ReadOutcome.LENGTH
        try:
            await read_chunk_into(reader, pack_key(tenant, place.pack), place, into)
        except BlobNotFound:
            return ReadOutcome.ABSENT
        except BlobShort:
            return ReadOutcome.SHORT
        return ReadOutcome.WHOLE

    async def _locate(self, tenant: str, digest: str, stale: tuple[ChunkLocation, ...]) -> tuple[ChunkLocation, ...]:
        """Return a chunk's places other than `stale`. If none is known, read more indexes; concurrent calls share that.
        Raises BlobUnavailable if no index that can be read has the chunk, and some can't be read.
        """
        table = self._table(tenant)
        if digest not in table.wrong_copies and (fresh := _without_stale(table.chunks.get(digest, ()), stale)):
            return fresh
        async with table.lock:
            await self._read_indexes(tenant, table, digest, stale)
            if digest not in table.chunks:  # a kept file's index may have been replaced by one with another layout
                table.forget_packs({pack for pack in table.known_packs if digest_of_file_pack(pack) is not None})
                await self._read_indexes(tenant, table, digest, stale)
            if (wrong_copy := table.wrong_copies.pop(digest, None)) is not None:
                table.put_last(digest, wrong_copy)
        fresh = _without_stale(table.chunks.get(digest, ()), stale)
        if not fresh and table.unavailable_packs:
            raise next(iter(table.unavailable_packs.values()))
        return fresh

    async def _read_indexes(
        self, tenant: str, table: _PackTable, digest: str, stale: tuple[ChunkLocation, ...]
    ) -> None:
        """Read indexes until the chunk is found.

        1. Of packs in the pack lists of the chunk's versions.
        2. Of packs that were listed before.
        3. Of packs in a new listing, which also shows which packs are gone.
        """

        def is_found() -> bool:
            return digest not in table.wrong_copies and bool(_without_stale(table.chunks.get(digest, ()), stale))

        if is_found():
            return
        # (1)
        for version in [version for version, digests in table.expected_versions.items() if digest in digests]:
            table.expected_versions.pop(version, None)  # it may have been dropped meanwhile
            listed_packs = await self._pack_list(tenant, version)
            await self._read_tables(tenant, table, [pack for pack in listed_packs if pack not in table.known_packs])
        # (2)
        await self._read_listed(tenant, table, is_found)
        if is_found():
            return
        # (3)
        existing_packs = {object_name(key) for key in await list_objects(self._store, tenant, PACKS)}
        table.forget_packs(table.known_packs - existing_packs)
        table.unavailable_packs.clear()
        table.unread_packs = sorted(existing_packs - table.known_packs)
        await self._read_listed(tenant, table, is_found)

    async def _read_listed(self, tenant: str, table: _PackTable, is_found: Callable[[], bool]) -> None:
        while table.unread_packs and not is_found():
            batch, table.unread_packs = table.unread_packs[:INDEX_BATCH], table.unread_packs[INDEX_BATCH:]
            await self._read_tables(tenant, table, [pack for pack in batch if pack not in table.known_packs])

    async def _pack_list(self, tenant: str, version: str) -> tuple[str, ...]:
        """Return the packs that a version's list names; none if it can't be read, so that all packs are searched."""
        try:
            return decode_pack_list(await self._store.read(pack_list_key(tenant, version))) or ()
        except (BlobNotFound, BlobUnavailable):
            return ()

    async def _read_tables(self, tenant: str, table: _PackTable, packs: Sequence[str]) -> None:
        """Read the indexes of packs. Unavailable ones are retried after the next listing. Raises BlobUnavailable if
        more than MAX_UNAVAILABLE_PACKS are unavailable.
        """

        async def read_index(pack: str) -> tuple[str, dict[str, ChunkLocation] | None]:
            try:
                return pack, await self._try_read_index(tenant, pack)
            except BlobUnavailable as error:
                table.unavailable_packs[pack] = error
                if len(table.unavailable_packs) > MAX_UNAVAILABLE_PACKS:
                    raise
                log.warning("a pack's index is unavailable", extra={"tenant": tenant, "pack": pack})
                return pack, None

        for pack, places in await bounded_gather(read_index, packs):
            if places is None:
                continue
            table.known_packs.add(pack)
            for digest, place in places.items():
                table.add(digest, place)

    async def _try_read_index(self, tenant: str, pack: str) -> dict[str, ChunkLocation] | None:
        """Return the places of a pack's chunks; None if it has no readable index or footer. Raises BlobUnavailable."""
        try:
            return await read_locations(self._store, tenant, pack)
        except BlobNotFound:  # the pack was collected, or is a kept file whose push has not ended
            return None
        except BlobUnavailable:
            raise
        except Refused as refused:
            self.unreadable_packs += 1
            log.error("a pack can't be read", extra={"pack": pack, "error": str(refused)})
            return None


def _without_stale(places: tuple[ChunkLocation, ...], stale: tuple[ChunkLocation, ...]) -> tuple[ChunkLocation, ...]:
    return tuple(place for place in places if place not in stale)
