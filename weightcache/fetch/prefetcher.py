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

MAX_PREFETCHES: Final = 64
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
        version_loader: VersionLoader,
        manifest_loader: ManifestLoader,
        attestations: AttestationLoader,
        admissions: NvmeAdmission,
        lease_priority: LeasePriority,
        counters: Counters,
    ) -> None:
        self._version_loader = version_loader
        self._manifest_loader = manifest_loader
        self._attestations = attestations
        self._admissions = admissions
        self._lease_priority = lease_priority
        self._counters = counters
        self._tasks: dict[PrefetchRequest, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self.running_count = 0

    @property
    def waiting_count(self) -> int:
        """Return the number of prefetches that wait for their turn or for leases."""
        return len(self._tasks) - self.running_count

    def start_prefetch(self, request: PrefetchRequest) -> None:
        """Start a prefetch in the background, unless it exists. Raises `Refused(Overloaded)` if there are too many."""
        if request in self._tasks:
            return
        if len(self._tasks) >= MAX_PREFETCHES:
            raise Refused(Overloaded("the queue of prefetches", MAX_PREFETCHES, RETRY_S))
        task = asyncio.create_task(self._run_prefetch(request))
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request))

    async def close(self) -> None:
        """Cancel all prefetches and wait for their ends."""
        await cancel_and_wait(tuple(self._tasks.values()))

    async def _run_prefetch(self, request: PrefetchRequest) -> None:
        """Run one prefetch from start to end, and count its result."""
        failure: Failure
        try:
            async with asyncio.timeout(DEADLINE_S):
                if request.urgent:
                    await self._load(request)
                else:
                    async with self._one_at_a_time:
                        await self._load_between_leases(request)
            self._counters.prefetched += 1
            return
        except TimeoutError:
            failure = DeadlineExceeded(DEADLINE_S, "prefetching a version")
        except Refused as refused:
            failure = refused.failure
        except Exception:
            log.exception("a prefetch failed", extra={"tenant": request.tenant, "version": request.version})
            failure = Internal()
        self._counters.prefetches_failed[failure.code] += 1
        fields = {"tenant": request.tenant, "version": request.version, "tier": request.tier, "why": failure.message}
        log.warning("a version was not prefetched", extra=fields)

    async def _load_between_leases(self, request: PrefetchRequest) -> None:
        key = (request.tenant, request.version)
        while True:
            await self._lease_priority.wait_until_free(key)
            if await self._lease_priority.try_run(lambda: self._load(request), key):
                return
            self._counters.prefetches_gave_way += 1

    async def _load(self, request: PrefetchRequest) -> None:
        self.running_count += 1
        try:
            if request.tier == "nvme" or not await self._try_load_to_host(request):
                await self._load_to_nvme(request)
        finally:
            self.running_count -= 1

    async def _try_load_to_host(self, request: PrefetchRequest) -> bool:
        """Load the version into the host tier. Return False if there is no room for it."""
        try:
            await self._version_loader.load(request.tenant, request.version, DEADLINE_S, urgent=request.urgent)
        except Refused as refused:
            if isinstance(refused.failure, CapacityExceeded | Overloaded):
                return False
            raise
        return True

    async def _load_to_nvme(self, request: PrefetchRequest) -> None:
        _, manifest = await self._manifest_loader.load_manifest(request.tenant, request.version)
        await self._attestations.load_seals(request.tenant, request.version)
        chunks = {chunk.digest: chunk.length for chunk in manifest.chunks}
        self._admissions.check_room(request.tenant, sum(chunks.values()))
        for digest, length in chunks.items():
            await self._admissions.ensure_written(request.tenant, digest, length)
