"""Which chunks a tenant has, and in which packs: read from the index objects, never another tenant's."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from blobstore.packs import PackEntry, decode_table
from blobstore.store import BlobNotFound, BlobStore
from contracts.artifact_errors import PackCorrupt
from contracts.errors import Refused
from contracts.keys import INDEX, PACKS, index_key

_TENANTS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class Place:
    """`length` bytes at `offset` of a pack."""

    pack: str
    offset: int
    length: int


class Catalog:
    """A cache of index objects. What it answers was true when it listed the store; packs are only ever added."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._tables: OrderedDict[str, dict[str, tuple[PackEntry, ...]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Catalog tenants={len(self._tables)}>"

    async def places(self, tenant: str) -> dict[str, Place]:
        """Where each chunk of the tenant lies: packs that have an index that decodes, and are there.

        A pack that was taken away (damaged, then deleted by an operator) makes its chunks missing, so that the next
        push sends them again.
        """
        packs = {key.rsplit("/", 1)[1] async for key in self._store.list(f"{tenant}/{PACKS}/")}
        indexed = {key.rsplit("/", 1)[1] async for key in self._store.list(f"{tenant}/{INDEX}/")}
        known = self._tables.get(tenant, {})
        tables: dict[str, tuple[PackEntry, ...]] = {}
        for pack in sorted(packs & indexed):
            table = known.get(pack) or await self._read(tenant, pack)
            if table is not None:
                tables[pack] = table
        self._tables[tenant] = tables
        self._tables.move_to_end(tenant)
        while len(self._tables) > _TENANTS_KEPT:
            self._tables.popitem(last=False)
        return {
            entry.digest: Place(pack, entry.offset, entry.length) for pack, table in tables.items() for entry in table
        }

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
