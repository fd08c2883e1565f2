"""Bring chunks into the host tier: each once however many wait, verified in place.

A chunk becomes ready only after its bytes, where they will be served from, matched its digest. Where no source has such
bytes, all who wait are refused by name.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from contracts.errors import Cancelled, Failure, Internal, Refused
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.fetching import Fetcher
from weightcache.policy.extents import Place
from weightcache.policy.host import Reservation

log = logging.getLogger(__name__)

Admit = Callable[[str, str, memoryview], Awaitable[bool]]
ADMISSIONS_AT_ONCE: Final = 1  # loads come first


@dataclass(slots=True)
class _Job:
    """One chunk on its way. Its outcome is the tier that it came from, or why it didn't."""

    place: Place
    waiting: int = 0
    outcome: asyncio.Future[str | Failure] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Loader:
    """`depth` chunks at once. Once begun, a load runs to its end whoever waits: its memory is in use until then."""

    def __init__(
        self,
        arena: Arena,
        fetcher: Fetcher,
        admit: Admit,
        counters: Counters,
        depth: int,
    ) -> None:
        self._arena = arena
        self._fetcher = fetcher
        self._admit = admit
        self._counters = counters
        self._depth = asyncio.Semaphore(depth)
        self._admissions = asyncio.Semaphore(ADMISSIONS_AT_ONCE)
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Loader loading={len(self._jobs)}>"

    @property
    def loading(self) -> int:
        """Chunks on their way."""
        return len(self._jobs)

    async def bring(self, reservation: Reservation) -> dict[str, str]:
        """Returns the tier that each chunk came from, all chunks being ready. Raises the first `Refused` otherwise;
        what is still queued then, or when cancelled, is given up unless others wait for it.
        """
        tenant = reservation.tenant
        for digest in reservation.load:
            self._start(tenant, digest, reservation.places[digest])
        jobs = {digest: self._jobs[tenant, digest] for digest in (*reservation.load, *reservation.wait)}
        for job in jobs.values():
            job.waiting += 1
        tiers = dict.fromkeys(reservation.places, "host")
        try:
            for digest, job in jobs.items():
                outcome = await asyncio.shield(job.outcome)
                if isinstance(outcome, Failure):
                    raise Refused(outcome)
                tiers[digest] = outcome
        finally:
            for job in jobs.values():
                job.waiting -= 1
        return tiers

    async def settle(self) -> None:
        """Wait until nothing is loading and all that was loaded has been admitted."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all; when it returns, nothing writes to the arena any more."""
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _start(self, tenant: str, digest: str, place: Place) -> None:
        self._jobs[tenant, digest] = _Job(place)
        self._arena.index.pin((place.slab,))
        self._own(self._load(tenant, digest))

    def _own(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, tenant: str, digest: str) -> None:
        """One job, start to end; the index, the pin and the waiters are settled whatever happens."""
        job = self._jobs[tenant, digest]
        outcome: str | Failure = Cancelled()
        try:
            async with self._depth:
                if job.waiting:
                    outcome = await self._fetcher.fetch(tenant, digest, await self._arena.view(job.place))
        except Refused as refused:
            outcome = refused.failure
        except Exception:
            log.exception("a load failed", extra={"chunk": digest})
            outcome = Internal()
        finally:
            del self._jobs[tenant, digest]
            if isinstance(outcome, Failure):
                self._arena.index.drop(tenant, digest)
            else:
                self._arena.index.mark_ready(tenant, digest)
                if outcome != "nvme":
                    self._arena.index.pin((job.place.slab,))
                    self._own(self._keep(tenant, digest, job.place))
            self._arena.unpin((job.place.slab,))
            job.outcome.set_result(outcome)

    async def _keep(self, tenant: str, digest: str, place: Place) -> None:
        """Admit a chunk to NVMe from the slab, which stays pinned until then."""
        try:
            async with self._admissions:
                admitted = await self._admit(tenant, digest, await self._arena.view(place))
            self._counters.admitted_chunks += admitted
            self._counters.unadmitted_chunks += not admitted
        finally:
            self._arena.unpin((place.slab,))
