"""Load versions before they are leased: when a deploy names them, and while a start waits for its process.

Prefetches run one after another, and wait while leases load. A new lease interrupts a prefetch; chunks that have
arrived stay. An urgent prefetch is part of a start: it neither waits nor yields.

If the host tier has no room for a version, its chunks are loaded to NVMe. A version that NVMe can't hold as a whole is
refused before anything is fetched.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, Literal

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.contracts.errors import CapacityExceeded, Failure, Internal, Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from weightcache.counters import Counters
from weightcache.fetch.attestation_loader import AttestationLoader
from weightcache.fetch.manifest_loader import ManifestLoader
from weightcache.fetch.nvme_admission import NvmeAdmission
from weightcache.fetch.version_loader import LeasePriority, VersionLoader

log = logging.getLogger(__name__)

MAX_UNDER_WAY: Final = 64
DEADLINE_S: Final = 900.0  # includes waiting
RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """A version, and the tier to load it into."""

    tenant: str
    version: str
    tier: Literal["host", "nvme"]
    urgent: bool = False


class Prefetcher:
    """Runs prefetches. A repeated request while the same one is running or waiting changes nothing."""

    def __init__(
        self,
        residents: VersionLoader,
        papers: ManifestLoader,
        attestations: AttestationLoader,
        admissions: NvmeAdmission,
        awaited: LeasePriority,
        counters: Counters,
    ) -> None:
        self._residents = residents
        self._manifest_loader = papers
        self._attestations = attestations
        self._admissions = admissions
        self._lease_priority = awaited
        self._counters = counters
        self._under_way: dict[PrefetchRequest, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.running = 0

    def __repr__(self) -> str:
        return f"<Prefetcher running={self.running} waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """Return the number of prefetches that wait for their turn or for leases."""
        return len(self._under_way) - self.running

    def start_prefetch(self, wish: PrefetchRequest) -> None:
        """Start a prefetch in the background, unless it exists. Raises `Refused(Overloaded)` if there are too many."""
        if wish in self._under_way:
            return
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise Refused(Overloaded("the queue of prefetches", MAX_UNDER_WAY, RETRY_S))
        task = asyncio.create_task(self._run_prefetch(wish))
        self._under_way[wish] = task
        task.add_done_callback(lambda _: self._under_way.pop(wish))

    async def close(self) -> None:
        """Cancel all prefetches and wait for their ends."""
        await cancel_and_wait(tuple(self._under_way.values()))

    async def _run_prefetch(self, wish: PrefetchRequest) -> None:
        """Run one prefetch from start to end, and count its result."""
        failure: Failure
        try:
            async with asyncio.timeout(DEADLINE_S):
                if wish.urgent:
                    await self._load(wish)
                else:
                    async with self._turn:
                        await self._load_between_leases(wish)
            self._counters.prefetched += 1
            return
        except TimeoutError:
            failure = DeadlineExceeded(DEADLINE_S, "prefetching a version")
        except Refused as refused:
            failure = refused.failure
        except Exception:
            log.exception("a prefetch failed", extra={"tenant": wish.tenant, "version": wish.version})
            failure = Internal()
        self._counters.prefetches_failed[failure.code] += 1
        fields = {"tenant": wish.tenant, "version": wish.version, "tier": wish.tier, "why": failure.message}
        log.warning("a version was not prefetched", extra=fields)

    async def _load_between_leases(self, wish: PrefetchRequest) -> None:
        key = (wish.tenant, wish.version)
        while True:
            await self._lease_priority.wait_until_free(key)
            if await self._lease_priority.try_run(lambda: self._load(wish), key):
                return
            self._counters.prefetches_gave_way += 1

    async def _load(self, wish: PrefetchRequest) -> None:
        self.running += 1
        try:
            if wish.tier == "nvme" or not await self._try_host(wish):
                await self._to_nvme(wish)
        finally:
            self.running -= 1

    async def _try_host(self, wish: PrefetchRequest) -> bool:
        """Load the version into the host tier. Return False if there is no room for it."""
        try:
            await self._residents.load(wish.tenant, wish.version, DEADLINE_S, urgent=wish.urgent)
        except Refused as refused:
            if isinstance(refused.failure, CapacityExceeded | Overloaded):
                return False
            raise
        return True

    async def _to_nvme(self, wish: PrefetchRequest) -> None:
        _, manifest = await self._manifest_loader.manifest(wish.tenant, wish.version)
        await self._attestations.load_seals(wish.tenant, wish.version)
        chunks = {chunk.digest: chunk.length for chunk in manifest.chunks}
        self._admissions.check_room(wish.tenant, sum(chunks.values()))
        for digest, length in chunks.items():
            await self._admissions.ensure(wish.tenant, digest, length)
