"""Which chunks a tenant has, in which packs, and how many bytes these take: never another tenant's.

Read from the index objects, which are cached: a pack never changes, so what it holds and its size are learnt once.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from blobstore.packs import PackEntry, decode_table, encode_footer
from blobstore.store import BlobNotFound, BlobStore
from contracts.artifact_errors import PackCorrupt
from contracts.errors import Refused
from contracts.keys import INDEX, PACKS, index_key, pack_key

_TENANTS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class Place:
    """`length` bytes at `offset` of a pack."""

    pack: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a tenant has: each chunk's place, and the size of all its packs, also of those that can't be used."""

    places: Mapping[str, Place]
    stored_bytes: int

    def lacks(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Those of `wanted` (digest -> length) that no pack holds, in order."""
        return {digest: length for digest, length in wanted.items() if not self._holds(digest, length)}

    def _holds(self, digest: str, length: int) -> bool:
        place = self.places.get(digest)
        return place is not None and place.length == length


@dataclass(frozen=True, slots=True)
class _Pack:
    """`entries` is None where the index is damaged or not there (yet)."""

    entries: tuple[PackEntry, ...] | None
    size: int


class Catalog:
    """What it answers was true when it listed the store."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._packs: OrderedDict[str, dict[str, _Pack]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Catalog tenants={len(self._packs)}>"

    async def holdings(self, tenant: str) -> Holdings:
        """The chunks of packs that have an index that decodes, and are there; the bytes of all packs.

        A pack that was taken away (damaged, then deleted by an operator) makes its chunks missing, so that the next
        push sends them again.
        """
        there = {key.rsplit("/", 1)[1] async for key in self._store.list(f"{tenant}/{PACKS}/")}
        indexed = {key.rsplit("/", 1)[1] async for key in self._store.list(f"{tenant}/{INDEX}/")}
        known = self._packs.get(tenant, {})
        packs: dict[str, _Pack] = {}
        for pack in sorted(there):
            packs[pack] = await self._look(tenant, pack, pack in indexed, known.get(pack))
        self._packs[tenant] = packs
        self._packs.move_to_end(tenant)
        while len(self._packs) > _TENANTS_KEPT:
            self._packs.popitem(last=False)
        places = {
            entry.digest: Place(name, entry.offset, entry.length)
            for name, pack in packs.items()
            for entry in pack.entries or ()
            if name in indexed
        }
        return Holdings(places, sum(pack.size for pack in packs.values()))

    async def places(self, tenant: str) -> Mapping[str, Place]:
        """Where each chunk of the tenant lies."""
        return (await self.holdings(tenant)).places

    async def _look(self, tenant: str, pack: str, is_indexed: bool, known: _Pack | None) -> _Pack:
        if known is not None and known.entries is not None:
            return known
        entries = await self._read(tenant, pack) if is_indexed else None
        if entries is not None:
            # No call of the store for the size: a pack is its chunks and this footer.
            end = entries[-1].offset + entries[-1].length if entries else 0
            return _Pack(entries, end + len(encode_footer(entries)))
        if known is not None:
            return known
        try:
            return _Pack(None, (await self._store.stat(pack_key(tenant, pack))).size)
        except BlobNotFound:  # taken away since it was listed
            return _Pack(None, 0)

    async def _read(self, tenant: str, pack: str) -> tuple[PackEntry, ...] | None:
        """None where the index is damaged or gone: fsck says so, a push goes around it."""
        try:
            return decode_table(await self._store.read(index_key(tenant, pack)), pack)
        except BlobNotFound:
            return None
        except Refused as refused:
            if isinstance(refused.failure, PackCorrupt):
                return None
            raise
