"""The store tier: chunks as ranges of packs. Where each lies, the packs' index objects tell, tenant by tenant.

An index object that is missing or damaged is replaced by the pack's own footer; a pack that has neither is left out, so
that it harms only the versions that need it.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from blobstore.packs import TRAILER_BYTES, PackEntry, decode_footer, decode_table, footer_bytes
from blobstore.store import BlobNotFound, BlobShort, BlobStore
from contracts.errors import Refused
from weightcache.policy.healing import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Location:
    """A chunk's range within a pack."""

    pack: str
    offset: int
    length: int


@dataclass(slots=True)
class _Table:
    """What is known of one tenant's packs."""

    chunks: dict[str, Location] = field(default_factory=dict)
    packs: set[str] = field(default_factory=set)
    learning: asyncio.Lock = field(default_factory=asyncio.Lock)


class StoreTier:
    """A `Source` over a `BlobStore`."""

    tier = "store"
    attempts = 2  # what came wrong once may be right in the store: a cache or a line on the way

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._tables: dict[str, _Table] = {}
        self.unreadable_packs = 0

    def __repr__(self) -> str:
        return f"<StoreTier tenants={len(self._tables)} {self._store!r}>"

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> Outcome:
        """See `Source`."""
        location = await self._locate(tenant, digest, stale=None)
        outcome = await self._read(tenant, location, into)
        if outcome is Outcome.ABSENT and location is not None:  # its pack was collected: it may have moved
            outcome = await self._read(tenant, await self._locate(tenant, digest, stale=location), into)
        return outcome

    async def quarantine(self, tenant: str, digest: str) -> None:
        """See `Source`. The store is the snapshotter's and its objects never change: `kelvin fsck` says how to mend."""

    async def _read(self, tenant: str, location: Location | None, into: memoryview) -> Outcome:
        if location is None:
            return Outcome.ABSENT
        if location.length != into.nbytes:
            return Outcome.LENGTH
        try:
            await self._store.read_into(f"{tenant}/packs/{location.pack}", location.offset, into)
        except BlobNotFound:
            return Outcome.ABSENT
        except BlobShort:
            return Outcome.SHORT
        return Outcome.WHOLE

    async def _locate(self, tenant: str, digest: str, stale: Location | None) -> Location | None:
        """Where it is. What is not known, or known to be `stale`, is looked up anew, once for all who ask at once."""
        table = self._tables.setdefault(tenant, _Table())
        if (known := table.chunks.get(digest)) is not None and known != stale:
            return known
        async with table.learning:
            if (known := table.chunks.get(digest)) is not None and known != stale:
                return known
            await self._learn(tenant, table)
        known = table.chunks.get(digest)
        return None if known == stale else known

    async def _learn(self, tenant: str, table: _Table) -> None:
        """Read the tables of packs that are new, forget those that are gone."""
        there = {key.rpartition("/")[2] async for key in self._store.list(f"{tenant}/packs/")}
        gone = table.packs - there
        table.packs -= gone
        table.chunks = {digest: at for digest, at in table.chunks.items() if at.pack not in gone}
        for pack in sorted(there - table.packs):
            entries = await self._entries(tenant, pack)
            if entries is None:
                continue  # looked at again next time
            table.packs.add(pack)
            for entry in entries:
                table.chunks.setdefault(entry.digest, Location(pack, entry.offset, entry.length))

    async def _entries(self, tenant: str, pack: str) -> tuple[PackEntry, ...] | None:
        try:
            return decode_table(await self._store.read(f"{tenant}/index/{pack}"), pack)
        except BlobNotFound:
            pass
        except Refused as refused:
            if refused.failure.retryable:
                raise
            log.warning("a pack's index is damaged", extra={"pack": pack, "error": str(refused)})
        try:
            return await self._footer(f"{tenant}/packs/{pack}", pack)
        except Refused as refused:
            if refused.failure.retryable:
                raise
            self.unreadable_packs += 1
            log.error("a pack can't be read", extra={"pack": pack, "error": str(refused)})
        return None

    async def _footer(self, key: str, pack: str) -> tuple[PackEntry, ...]:
        size = (await self._store.stat(key)).size
        trailer = await self._store.read(key, max(0, size - TRAILER_BYTES))
        length = footer_bytes(trailer, size, pack)
        return decode_footer(await self._store.read(key, size - length), size, pack)
