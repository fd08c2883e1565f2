"""Write chunks to the NVMe tier and count them. No other code writes chunks there.

A chunk is written for one of three reasons:

1. Write-behind (`offer`): a load brought the chunk from another tier. It is written from its slab, perhaps while other
   chunks of the version still load. An offer pins that slab until it is written, so the host tier bounds the offers. If
   a load needs the memory, the oldest offers are dropped unwritten (`drop_oldest`): their chunks can be fetched again.
2. Prefetch (`ensure_written`): no lease needs the chunk, so it takes no place in the host tier. If it is not in memory
   already, it is fetched into a separate buffer, once for all callers.
3. Healing (`rewrite`): an examination found its file damaged while no lease needed it.
"""

import asyncio
import logging
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.contracts.artifact_errors import ChunkMissing
from kelvin.contracts.errors import CapacityExceeded, Refused, Unavailable
from kelvin.contracts.traffic_errors import DeadlineExceeded
from weightcache.counters import Counters
from weightcache.fetch.fetcher import Fetcher
from weightcache.host.arena import Arena
from weightcache.host.policy.extents import SlabRange
from weightcache.nvme.disk_index_policy import may_begin_write
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.sources.store_tier import StoreTier

log = logging.getLogger(__name__)

REWRITE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _QueuedWrite:
    tenant: str
    digest: str
    place: SlabRange


class NvmeAdmission:
    """The writer of the NVMe tier. `lower_fetcher` fetches from the sources under that tier; `store_tier` is the last
    of them. `is_disk_read` returns whether the disk is being read for a load.
    """

    def __init__(
        self,
        arena: Arena,
        nvme: NvmeTier,
        lower_fetcher: Fetcher,
        store_tier: StoreTier,
        counters: Counters,
        is_disk_read: Callable[[], bool],
    ) -> None:
        self._arena = arena
        self._nvme = nvme
        self._lower_fetcher = lower_fetcher
        self._store_tier = store_tier
        self._counters = counters
        self._is_disk_read = is_disk_read
        self._offers: deque[_QueuedWrite] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups: set[asyncio.Task[int | None]] = set()  # lookups of chunk lengths, before the chunks are fetched
        arena.on_full = self.drop_oldest

    @property
    def waiting_count(self) -> int:
        """Return the number of chunks that are queued for writing or being written."""
        return len(self._offers) + len(self._tasks)

    def offer(self, tenant: str, digest: str, place: SlabRange) -> None:
        """Queue a ready chunk for writing, in order of offers. The caller must have its slab pinned."""
        self._arena.index.pin((place.slab,))
        self._offers.append(_QueuedWrite(tenant, digest, place))
        self._start_writes()

    def drop_oldest(self) -> bool:
        """Drop the oldest offer and all others in its slab, unwritten. Return False if there is none."""
        if not self._offers:
            return False
        slab = self._offers[0].place.slab
        dropped = [offer for offer in self._offers if offer.place.slab == slab]
        self._offers = deque(offer for offer in self._offers if offer.place.slab != slab)
        self._counters.unkept_chunks += len(dropped)
        for offer in dropped:
            self._unpin(offer)
        return True

    def check_room(self, tenant: str, nbytes: int) -> None:
        """Raise `Refused(CapacityExceeded)` if the tenant can't have `nbytes` on NVMe at once. In that case its chunks
        would only evict one another.
        """
        if nbytes > (max_bytes := self._nvme.index.max_bytes_of(tenant)):
            raise Refused(CapacityExceeded("bytes of the NVMe tier of the weight cache", nbytes, max_bytes))

    async def ensure_written(self, tenant: str, digest: str, length: int | None) -> str | None:
        """Ensure that the chunk is on NVMe. Return its source tier, or None if it was there or another call wrote it.

        Waits for a running load or write of the chunk. Without a `length` (bytes), the length is looked up in the
        packs. Raises `Refused`: no source has good bytes; CapacityExceeded if there is no room for a chunk
        to be fetched, before it is fetched; Unavailable if the write failed, or a chunk in memory finds no room.
        """
        while not await self._nvme.wait_until_written(tenant, digest):
            if self._arena.index.is_loading(tenant, digest):
                await self._arena.wait_until_loaded(tenant, digest)
                continue  # it may be written by now, or the load may have failed
            if length is None and not self._arena.index.is_ready(tenant, digest):
                length = await self._find_length(tenant, digest)
                continue  # another call may load it by now
            tier, admitted = await self._fetch_and_write(tenant, digest, length)
            if admitted:
                return tier
            if not self._nvme.index.is_known((tenant, digest)):  # otherwise another call was faster
                raise Refused(Unavailable("the NVMe tier of the weight cache"))
        return None

    async def _find_length(self, tenant: str, digest: str) -> int:
        """Return the chunk's bytes by the store's tables. Loads of the chunk don't wait for this. Raises `Refused`."""
        lookup = asyncio.create_task(self._store_tier.find_length(tenant, digest))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)
        if (length := await lookup) is None:
            raise Refused(ChunkMissing(digest))
        return length

    async def _fetch_and_write(self, tenant: str, digest: str, length: int | None) -> tuple[str, bool]:
        """Write the chunk from memory or from a source below. Return its tier there, and whether it was admitted.
        `length` must be known if the chunk is not in memory.
        """
        place = self._arena.index.try_place(tenant, digest)
        if place is not None:
            self._arena.index.pin((place.slab,))
            try:
                return "host", await self._write(tenant, digest, await self._arena.view(place))
            finally:
                self._arena.unpin((place.slab,))
        assert length is not None
        with self._nvme.mark_writing(tenant, digest):
            if not self._nvme.index.has_room_for(tenant, length):
                free = max(0, self._nvme.index.budget_bytes - self._nvme.index.total_bytes)
                raise Refused(CapacityExceeded("bytes of the NVMe tier of the weight cache", length, free))
            buffer = memoryview(mmap.mmap(-1, length))
            flow = object()
            self._lower_fetcher.scheduler.enter(flow, {(tenant, digest): 0})
            try:
                tier = await self._lower_fetcher.fetch(tenant, digest, buffer)
            finally:
                self._lower_fetcher.scheduler.leave(flow)
            return tier, await self._write(tenant, digest, buffer)

    async def rewrite(self, tenant: str, digest: str) -> None:
        """Replace the chunk's faulty file. A failure is logged: the next load heals the chunk or is refused."""
        fields = {"tenant": tenant, "chunk": digest}
        try:
            async with asyncio.timeout(REWRITE_TIMEOUT_S):
                tier = await self.ensure_written(tenant, digest, None)  # a faulty file does not tell the chunk's length
        except TimeoutError:
            why = DeadlineExceeded(REWRITE_TIMEOUT_S, "healing").message
            log.warning("a kept chunk was not healed", extra={**fields, "why": why})
        except Refused as refused:
            log.warning("a kept chunk was not healed", extra={**fields, "why": refused.failure.message})
        else:
            if tier is not None:
                self._counters.healed_chunks[tier] += 1
                log.warning("a kept chunk was healed", extra={**fields, "healed_from": tier})

    async def wait_until_idle(self) -> None:
        """Wait until no offer is left, and until prefetches and healing have written their current chunks."""
        while running := self._tasks | self._lookups:
            await asyncio.wait(running)
        await self._nvme.wait_until_idle()

    async def close(self) -> None:
        """Drop all offers and cancel their writes. On return nothing reads the slabs any more."""
        while self._offers:
            self._unpin(self._offers.popleft())
        await cancel_and_wait(tuple(self._tasks))

    def _start_writes(self) -> None:
        while self._offers and may_begin_write(len(self._tasks), is_disk_read=self._is_disk_read()):
            task = asyncio.create_task(self._write_offer(self._offers.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._on_write_end)

    def _on_write_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_writes()

    async def _write_offer(self, offer: _QueuedWrite) -> None:
        try:
            # If the chunk was found damaged in memory meanwhile, it is gone or at another place.
            if self._arena.index.try_place(offer.tenant, offer.digest) == offer.place:
                await self._write(offer.tenant, offer.digest, await self._arena.view(offer.place))
        finally:
            self._unpin(offer)

    def _unpin(self, offer: _QueuedWrite) -> None:
        self._arena.unpin((offer.place.slab,))

    async def _write(self, tenant: str, digest: str, data: memoryview) -> bool:
        admitted = await self._nvme.admit(tenant, digest, data)
        self._counters.admitted_chunks += admitted
        self._counters.unadmitted_chunks += not admitted and not self._nvme.index.is_known((tenant, digest))
        return admitted
