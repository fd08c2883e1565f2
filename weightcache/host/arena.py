"""The host tier: apply the index's decisions to slabs. `chunk_loader.py` fills slabs, `lease_server.py` lends them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import Overloaded
from weightcache.host.policy.extents import SlabRange
from weightcache.host.policy.host_index import HostIndex, Reservation
from weightcache.host.slab_pool import Slab, SlabPool

SLAB_TIMEOUT_S = 60.0


class Arena:
    """The index with the memory behind each of its slabs. `on_slab_end` is called with the number of each slab that
    ends. `on_full` is called when there is no room: it unpins memory that no load needs, and returns whether it did.
    """

    def __init__(self, index: HostIndex, pool: SlabPool) -> None:
        self.index = index
        self.pool = pool
        self.on_slab_end: Callable[[int], None] = lambda _: None
        self.on_full: Callable[[], bool] = lambda: False
        self._slabs: dict[int, asyncio.Task[Slab]] = {}
        self._load_ends: dict[tuple[str, str], asyncio.Event] = {}  # loads with waiters for their end, by chunk

    def __repr__(self) -> str:
        return f"<Arena {self.index!r} {self.pool!r}>"

    def reserve(self, tenant: str, chunks: Sequence[tuple[str, int]], now: float) -> Reservation:
        """Reserve places, see `HostIndex.reserve`, and start to allocate new slabs. `view` and `wait_until_allocated`
        wait for them.
        """
        while True:
            try:
                reservation = self.index.reserve(tenant, chunks, now)
                break
            except Refused as refused:
                if not isinstance(refused.failure, Overloaded) or not self.on_full():
                    raise
        self._end(reservation.evicted_slabs)
        for number in reservation.new_slabs:
            self._slabs[number] = asyncio.create_task(self.pool.acquire(tenant, SLAB_TIMEOUT_S))
        return reservation

    def withdraw(self, reservation: Reservation) -> None:
        """Undo a reservation before its load starts: forget the places of its chunks and unpin its slabs."""
        for digest in reservation.to_load:
            self.finish_load(reservation.tenant, digest, is_ready=False)
        self.unpin(reservation.slabs)

    def finish_load(self, tenant: str, digest: str, *, is_ready: bool) -> None:
        """End the load of a chunk. If `is_ready`, it is served from now on; otherwise it loses its place."""
        if is_ready:
            self.index.mark_ready(tenant, digest)
        else:
            self.index.drop(tenant, digest)
        if (load_end := self._load_ends.pop((tenant, digest), None)) is not None:
            load_end.set()

    async def wait_until_loaded(self, tenant: str, digest: str) -> None:
        """Wait until no load of the chunk is running, however it ends."""
        while self.index.is_loading(tenant, digest):
            await self._load_ends.setdefault((tenant, digest), asyncio.Event()).wait()

    async def view(self, place: SlabRange) -> memoryview:
        """Return the place's bytes, writable, once its slab is allocated. They are valid while the slab is pinned.
        Raises `Refused(Unavailable)` if there is no memory.
        """
        slab = await asyncio.shield(self._slabs[place.slab])
        return slab.view(place.offset, place.length)

    async def wait_until_allocated(self, slabs: Iterable[int]) -> bool:
        """Wait until each of these slabs is allocated or has failed. Return whether all are allocated."""
        tasks = [self._slabs[number] for number in slabs]
        if tasks:
            await asyncio.wait(tasks)
        return not any(task.cancelled() or task.exception() for task in tasks)

    def slab(self, number: int) -> Slab:
        """Return the memory of a slab that is allocated. Its chunks may still be loading."""
        return self._slabs[number].result()

    def unpin(self, slabs: Iterable[int]) -> None:
        """Undo one pin of each slab, see `HostIndex.unpin`, and recycle the slabs that ended."""
        self._end(self.index.unpin(slabs))

    def drop_holder(self, holder: int) -> None:
        """Remove a holder, see `HostIndex.drop_holder`, and recycle the slabs that ended."""
        self._end(self.index.drop_holder(holder))

    def evict(self, tenant: str | None, digests: frozenset[str] | None) -> int:
        """Evict chunks, see `HostIndex.evict`. Return how many slabs stay because they are in use."""
        ended, busy = self.index.evict(tenant, digests)
        self._end(ended)
        return busy

    async def close(self) -> None:
        """Free all slabs. Loads must have ended. Processes keep their mappings."""
        await asyncio.gather(*self._slabs.values(), return_exceptions=True)
        await self.pool.close()

    def _end(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._slabs.pop(number).add_done_callback(self._recycle)
            self.on_slab_end(number)

    def _recycle(self, slab_task: asyncio.Task[Slab]) -> None:
        if not slab_task.cancelled() and slab_task.exception() is None:
            self.pool.release(slab_task.result())
