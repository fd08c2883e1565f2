"""Bring chunks to NVMe that no lease has asked for: from the host tier where they are in it, else from below.

No place in the host tier is taken: one chunk at a time passes through a buffer of its own, and once however many ask.
"""

import mmap

from contracts.errors import CapacityExceeded, Refused, Unavailable
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.fetching import Fetcher
from weightcache.nvme import NvmeTier


class Keeper:
    """Keeps chunks on the NVMe tier. `below` fetches them from the sources under that tier."""

    def __init__(self, arena: Arena, nvme: NvmeTier, below: Fetcher, counters: Counters) -> None:
        self._arena = arena
        self._nvme = nvme
        self._below = below
        self._counters = counters

    def __repr__(self) -> str:
        return f"<Keeper of {self._nvme!r}>"

    def check_room(self, tenant: str, nbytes: int) -> None:
        """Raise `Refused(CapacityExceeded)` if the tenant can't have `nbytes` on NVMe at once: its chunks would only
        drive out one another.
        """
        if nbytes > (most := self._nvme.index.most_bytes_of(tenant)):
            raise Refused(CapacityExceeded("bytes of the NVMe tier of the weight cache", nbytes, most))

    async def ensure(self, tenant: str, digest: str, length: int) -> str | None:
        """Ensure that the chunk is on NVMe. Return the tier that it was kept from.

        Return None if there was nothing to do: the chunk was there, another call brought it meanwhile, or a load that
        is under way will admit it.

        Raises `Refused`: no source has good bytes; CapacityExceeded if there is no room, before anything is fetched;
        Unavailable if the disk did not take it.
        """
        if await self._nvme.came(tenant, digest) or self._arena.index.is_loading(tenant, digest):
            return None
        place = self._arena.index.try_place(tenant, digest)
        if place is not None:
            self._arena.index.pin((place.slab,))
            try:
                await self._admit(tenant, digest, await self._arena.view(place))
            finally:
                self._arena.unpin((place.slab,))
            return "host"
        if not self._nvme.index.has_room_for(tenant, length):
            free = max(0, self._nvme.index.budget_bytes - self._nvme.index.total_bytes)
            raise Refused(CapacityExceeded("bytes of the NVMe tier of the weight cache", length, free))
        with self._nvme.coming(tenant, digest):
            buffer = memoryview(mmap.mmap(-1, length))
            flow = object()
            self._below.turns.enter(flow, {(tenant, digest): 0})
            try:
                tier = await self._below.fetch(tenant, digest, buffer)
            finally:
                self._below.turns.leave(flow)
            await self._admit(tenant, digest, buffer)
        return tier

    async def _admit(self, tenant: str, digest: str, data: memoryview) -> None:
        admitted = await self._nvme.admit(tenant, digest, data)
        self._counters.admitted_chunks += admitted
        self._counters.unadmitted_chunks += not admitted
        if not admitted and not self._nvme.index.knows((tenant, digest)):  # else a load was quicker
            raise Refused(Unavailable("the NVMe tier of the weight cache"))
