"""The whole cache of one machine: tiers, loaders, prefetcher, examiner. The sockets that serve it are elsewhere."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from kelvin.blobstore.blob_store import BlobStore
from kelvin.contracts.errors import Conflict, InvalidRequest, Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.crypto.trust_roots import read_trust
from kelvin.process.loops import Loops
from weightcache.app.peer_node import PeerNode, open_peers
from weightcache.app.settings import CacheSettings
from weightcache.counters import Counters
from weightcache.fetch.attestation_loader import AttestationLoader
from weightcache.fetch.chunk_loader import ChunkLoader
from weightcache.fetch.fetcher import Fetcher
from weightcache.fetch.manifest_loader import ManifestLoader
from weightcache.fetch.nvme_admission import NvmeAdmission
from weightcache.fetch.prefetcher import Prefetcher
from weightcache.fetch.tier_model_policy import TierModel, file_reload_estimator, slab_reload_estimator
from weightcache.fetch.trust_policy import VerificationPolicy
from weightcache.fetch.version_loader import LeasePriority, VersionLoader
from weightcache.host.arena import Arena
from weightcache.host.policy.host_index import HostIndex
from weightcache.host.policy.pool_sizes import choose_thread_counts, spare_slabs
from weightcache.host.resident_version import TIERS, TierTally
from weightcache.host.slab_pool import SlabPool
from weightcache.nvme.disk_index_policy import DiskIndex
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.nvme.scrubber import ChunkExaminer, Scrubber
from weightcache.sources.policy.bdp_window import BdpWindow
from weightcache.sources.policy.read_hedging import HedgeRule, ReadHedging
from weightcache.sources.source import Source, Verify, is_digest_of
from weightcache.sources.store_ranges import StoreRanges
from weightcache.sources.store_tier import StoreTier
from weightcache.sources.verifier import Recheck, Tags, Verifier

EVICT_WAIT_S: Final = 20.0  # less than the control plane's timeout for the response


@dataclass(frozen=True, slots=True)
class Cache:
    """The parts of an open cache. Valid inside the block of `open_cache`."""

    arena: Arena
    nvme: NvmeTier
    store_tier: StoreTier
    fetcher: Fetcher
    admissions: NvmeAdmission
    loader: ChunkLoader
    manifest_loader: ManifestLoader
    version_loader: VersionLoader
    prefetcher: Prefetcher
    examiner: ChunkExaminer
    counters: Counters
    peer_node: PeerNode | None

    async def locate_chunks(self, tenant: str, version: str) -> TierTally:
        """Count the version's distinct chunks by the tier in which a lease would find them now. Reads no chunk. Peers
        are not asked: their chunks count as the store's. Raises as `ManifestLoader.load_manifest`.
        """
        if (hot := self.version_loader.try_hot_tally(tenant, version)) is not None:
            return hot
        _, manifest = await self.manifest_loader.load_manifest(tenant, version)
        tally = TierTally(dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0))
        for digest, length in {chunk.digest: chunk.length for chunk in manifest.chunks}.items():
            tier = "store"
            if self.arena.index.is_ready(tenant, digest):
                tier = "host"
            elif self.nvme.index.is_readable((tenant, digest)):
                tier = "nvme"
            tally.chunks[tier] += 1
            tally.bytes[tier] += length
        return tally

    async def evict(self, tier: Literal["host", "nvme"], tenant: str | None, version: str | None) -> None:
        """Evict chunks of the version (None: all) of the tenant (None: all) from the tier. In the host tier whole slabs
        end, with chunks of other versions. On NVMe the version's manifest and attestations are removed too.

        First waits for running loads and writes, at most EVICT_WAIT_S. Chunks that a prefetch brings later stay. Raises
        `Refused`: Conflict if slabs are in use (the others are evicted then), InvalidRequest for a version without a
        tenant, Unavailable if the disk refuses, and as `ManifestLoader.load_manifest`.
        """
        digests = None
        if version is not None:
            if tenant is None:
                raise Refused(InvalidRequest("tenant", "null", "must be given with a version"))
            _, manifest = await self.manifest_loader.load_manifest(tenant, version)
            digests = frozenset(chunk.digest for chunk in manifest.chunks)
        with suppress(TimeoutError):
            async with asyncio.timeout(EVICT_WAIT_S):
                await self.loader.wait_until_idle()
        if tier == "nvme":
            await self.nvme.evict(tenant, version, digests)
        elif busy := self.arena.evict(tenant, digests):
            raise Refused(Conflict("the host tier", f"{busy} slabs are in use by living processes or loads"))


@asynccontextmanager
async def open_cache(
    settings: CacheSettings, store: BlobStore, *, verify: Verify = is_digest_of
) -> AsyncIterator[Cache]:
    """Open the cache. Raises BlockingIOError if another agent has the directory, BadSetting for invalid trust
    roots, or if KELVIN_VERIFY needs a key and there is none.
    """
    counters = Counters()
    tier_model = TierModel()
    nvme_quota = settings.nvme_bytes * settings.nvme_quota // 100
    disk = DiskIndex(settings.nvme_bytes, nvme_quota, file_reload_estimator(tier_model))
    trust = read_trust(settings.data, settings.roots)
    if settings.verify is VerificationPolicy.REQUIRE and not trust.roots:
        raise BadSetting("KELVIN_VERIFY", settings.verify, f"needs a public key (*.pem) in {settings.roots}")
    async with AsyncExitStack() as stack:
        threads = choose_thread_counts(len(os.sched_getaffinity(0)))
        reads = stack.enter_context(ThreadPoolExecutor(threads.read, "read"))
        hashes = stack.enter_context(ThreadPoolExecutor(threads.hash, "hash"))
        slab_threads = stack.enter_context(ThreadPoolExecutor(threads.make, "slab"))
        verifier = Verifier(hashes, verify, counters, Tags() if settings.recheck is Recheck.TAG else None)
        nvme = NvmeTier(settings.cache, disk, reads, time.time, verifier, threads.loads_at_once)
        await nvme.open()
        stack.callback(nvme.close)
        limit = settings.host_bytes // settings.slab_bytes
        quota = max(1, limit * settings.host_quota // 100)
        spare = spare_slabs(settings.host_bytes, settings.slab_bytes, settings.spare_bytes)
        pool = SlabPool(settings.slab_bytes, limit, slab_threads, spare=spare, at_once=threads.make)
        reload_s = slab_reload_estimator(tier_model, disk.is_readable)
        arena = Arena(HostIndex(settings.slab_bytes, limit, quota, reload_s), pool)
        stack.push_async_callback(arena.close)
        arena.pool.ensure_spare()
        hedging = ReadHedging(HedgeRule(settings.hedge_percent / 100))
        store_tier = StoreTier(store, StoreRanges(store, hedging, BdpWindow(settings.store_reads), counters))
        peer_node = await stack.enter_async_context(
            open_peers(settings.peers, arena, nvme, store_tier, verifier, counters)
        )
        lower_sources: tuple[Source, ...] = (store_tier,) if peer_node is None else (peer_node.tier, peer_node.store)
        peers = None if peer_node is None else peer_node.tier
        fetcher = Fetcher((nvme, *lower_sources), verifier, counters, peers)
        lower_fetcher = fetcher.below_first_source()
        admissions = NvmeAdmission(
            arena, nvme, lower_fetcher, store_tier, counters, lambda: fetcher.scheduler.running[nvme.tier] > 0
        )
        loader = ChunkLoader(arena, fetcher, admissions)
        stack.push_async_callback(loader.close)
        manifest_loader = ManifestLoader(store, nvme, store_tier, counters)
        attestations = AttestationLoader(store, nvme, counters, trust, settings.verify)
        lease_priority = LeasePriority()
        version_loader = VersionLoader(arena, loader, manifest_loader, attestations, lease_priority, tier_model)
        stack.push_async_callback(version_loader.close)
        prefetcher = Prefetcher(version_loader, manifest_loader, attestations, admissions, lease_priority, counters)
        stack.push_async_callback(prefetcher.close)
        examiner = ChunkExaminer(arena, nvme, verifier, counters, version_loader.forget_slab, admissions.rewrite)
        if settings.scrub_s:
            scrubber = Scrubber(
                examiner, settings.scrub_s, lambda: bool(loader.loading_count) or lease_priority.is_busy(), counters
            )
            loops = await stack.enter_async_context(Loops())
            loops.start("scrub", scrubber.run)
        yield Cache(
            arena,
            nvme,
            store_tier,
            fetcher,
            admissions,
            loader,
            manifest_loader,
            version_loader,
            prefetcher,
            examiner,
            counters,
            peer_node,
        )
