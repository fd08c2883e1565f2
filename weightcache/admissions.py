"""Write-behind: chunks that came from elsewhere are kept on NVMe, from the slabs, after those who wait have them.

What waits to be written pins its slab, so that no more waits than the host tier holds. Where that memory is needed, it
is let go instead: it can be fetched again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.policy.extents import Place
from weightcache.policy.writing import may_begin

Admit = Callable[[str, str, memoryview], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class _Offer:
    tenant: str
    digest: str
    place: Place


class Admissions:
    """In the order in which chunks arrived. `loading` says whether the disk is being read for somebody."""

    def __init__(
        self,
        arena: Arena,
        admit: Admit,
        counters: Counters,
        loading: Callable[[], bool],
    ) -> None:
        self._arena = arena
        self._admit = admit
        self._counters = counters
        self._loading = loading
        self._offers: deque[_Offer] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        arena.on_full = self.shed

    def __repr__(self) -> str:
        return f"<Admissions writing={len(self._tasks)} waiting={len(self._offers)}>"

    @property
    def waiting(self) -> int:
        """Chunks that wait to be written, or are."""
        return len(self._offers) + len(self._tasks)

    def offer(self, tenant: str, digest: str, place: Place) -> None:
        """Admit a ready chunk some time; whoever offers it has its slab pinned."""
        self._arena.index.pin((place.slab,))
        self._offers.append(_Offer(tenant, digest, place))
        self._begin()

    def shed(self) -> bool:
        """Let go of what waits longest, and of all else in its slab. False where nothing waits."""
        if not self._offers:
            return False
        slab = self._offers[0].place.slab
        gone = [offer for offer in self._offers if offer.place.slab == slab]
        self._offers = deque(offer for offer in self._offers if offer.place.slab != slab)
        self._counters.unkept_chunks += len(gone)
        for offer in gone:
            self._end(offer)
        return True

    async def settle(self) -> None:
        """Wait until nothing is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Let all go, whatever it is doing; when it returns, nothing reads the slabs any more."""
        while self._offers:
            self._end(self._offers.popleft())
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _begin(self) -> None:
        while self._offers and may_begin(len(self._tasks), loading=self._loading()):
            task = asyncio.create_task(self._keep(self._offers.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._begin()

    async def _keep(self, offer: _Offer) -> None:
        try:
            admitted = await self._admit(offer.tenant, offer.digest, await self._arena.view(offer.place))
            self._counters.admitted_chunks += admitted
            self._counters.unadmitted_chunks += not admitted
        finally:
            self._end(offer)

    def _end(self, offer: _Offer) -> None:
        self._arena.unpin((offer.place.slab,))
