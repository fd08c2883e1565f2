"""The agent's HTTP API: health, state, eviction, prefetch, checks, and where a version's chunks are. Weights are sent
over the lease socket.
"""

import asyncio
from typing import Literal

from fastapi import FastAPI, Request, Response

from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.errors import InvalidRequest, Refused, Unavailable
from kelvin.contracts.names import is_digest, require_dns_label
from kelvin.contracts.serving.start_forecast import TierPlacement, TierRate
from kelvin.contracts.wire import Wire
from kelvin.ipc.failure_responses import install_failure_handlers, problem_response
from kelvin.ipc.http_bodies import json_response, read_json
from weightcache.app.cache import Cache
from weightcache.app.lease_server import LeaseServer
from weightcache.app.peer_node import PeerState, peer_state
from weightcache.counters import plain
from weightcache.fetch.prefetcher import PrefetchRequest


class EvictBody(Wire, frozen=True):
    """Body of `POST /v1/evict`: evict the chunks of one version, one tenant, or all. See `Cache.evict`."""

    tier: Literal["host", "nvme"]
    tenant: str | None = None
    version: Digest | None = None


class PrefetchBody(Wire, frozen=True):
    """Body of `POST /v1/prefetch`: load the version into the tier. `urgent`: a start waits for it."""

    tenant: str
    version: Digest
    tier: Literal["host", "nvme"] = "host"
    urgent: bool = False


class PrefetchState(Wire, frozen=True):
    """Prefetches by state, and results of finished ones. `failed` counts by the failure's code."""

    running: int
    waiting: int
    done: int
    gave_way: int
    failed: dict[str, int]


class Damaged(Wire, frozen=True):
    """A chunk that changed in memory after its check, and the processes that still have it mapped."""

    tenant: str
    chunk: Digest
    pids: tuple[int, ...]


class DamageList(Wire, frozen=True):
    """Response of `GET /v1/damages`: a small part of the state, for clients that poll."""

    damaged: tuple[Damaged, ...]


class HostState(Wire, frozen=True):
    """State of the host tier. `slabs_huge` slabs have huge pages only. `slabs_quota` is the quota of one tenant."""

    bytes: int
    budget_bytes: int
    chunks: int
    versions: int
    slab_bytes: int
    slabs_used: int
    slabs_busy: int
    slabs_free: int
    slabs_huge: int
    slabs_quota: int
    slabs_by_tenant: dict[str, int]
    loading: int


class NvmeState(Wire, frozen=True):
    """State of the NVMe tier. `bytes_by_way` counts bytes read since the start of the agent, without the
    scrubber's.

    Ways: from the page cache (`cached`), past it (`direct`), or through it (`buffered`) if the file system refuses
    direct reads. `recognised_bytes` of them were compared with a tag.
    """

    bytes: int
    budget_bytes: int
    quota_bytes: int
    bytes_by_tenant: dict[str, int]
    chunks: int
    bytes_by_way: dict[str, int]
    recognised_bytes: int


class State(Wire, frozen=True):
    """Response of `GET /v1/state`.

    Counters start with the agent, and have only the tiers, kinds and codes that occurred. `chunk_faults` count by tier
    and kind, `healed_chunks` by the tier with the good copy, `refused_chunks` by the failure's code.
    `unverified_versions` lacked a trusted signature while `require` or `warn` demands one. `unkept_chunks` were not
    written to NVMe because their memory was needed. `hedges` are repeated reads of the store, `strangers` connections
    of other users or PID namespaces, `examined_chunks` chunks that were hashed again. `reads_running`, `chunks_queued`
    and `chunks_to_admit` are current values. `rates` has the tiers below the host's.
    """

    host: HostState
    nvme: NvmeState
    prefetches: PrefetchState
    connections: int
    leases: int
    holders: int
    leases_granted: int
    leases_hot: int
    leases_refused: dict[str, int]
    strangers: int
    examined_chunks: dict[str, int]
    sweeps: int
    damaged: tuple[Damaged, ...]
    chunk_reads: dict[str, int]
    bytes_read: dict[str, int]
    chunk_faults: dict[str, dict[str, int]]
    manifest_faults: dict[str, dict[str, int]]
    attestation_faults: dict[str, dict[str, int]]
    unverified_versions: int
    healed_chunks: dict[str, int]
    healed_manifests: dict[str, int]
    refused_chunks: dict[str, int]
    admitted_chunks: int
    unadmitted_chunks: int
    unkept_chunks: int
    chunks_to_admit: int
    reads_running: dict[str, int]
    chunks_queued: dict[str, int]
    hedges: int
    hedges_won: int
    unreadable_packs: int
    rates: dict[str, TierRate]
    peers: PeerState


def make_app(cache: Cache, leases: LeaseServer) -> FastAPI:
    """Return the application for an open cache."""
    app = FastAPI(title="Kelvin weight cache", openapi_url=None)
    install_failure_handlers(app)
    check_lock = asyncio.Lock()

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response(status_code=200) if leases.is_accepting else problem_response(Unavailable("the weight cache"))

    @app.get("/v1/state")
    async def state() -> Response:
        return json_response(state_of(cache, leases))

    @app.get("/v1/damages")
    async def damages() -> Response:
        return json_response(DamageList(damaged=list_damages(cache, leases)))

    @app.get("/v1/whereabouts")
    async def locate_chunks(request: Request) -> Response:
        query = {name: request.query_params.get(name, "") for name in ("tenant", "version")}
        if not is_digest(query["version"]):
            raise Refused(InvalidRequest("version", query["version"][:80], "must be 64 hex digits"))
        leases.check_tenant(require_dns_label(query["tenant"], "tenant"), query["version"])
        tally = await cache.locate_chunks(query["tenant"], query["version"])
        found = TierPlacement(
            chunks_by_tier=tally.chunks,
            bytes_by_tier=tally.bytes,
            rates=list_rates(cache),
            bytes_s=cache.version_loader.tier_model.load_time_s(tally.bytes),
        )
        return json_response(found)

    @app.post("/v1/evict")
    async def evict(request: Request) -> Response:
        body = await read_json(request, EvictBody)
        if body.tenant is not None:
            require_dns_label(body.tenant, "tenant")
        await cache.evict(body.tier, body.tenant, body.version)
        return Response(status_code=204)

    @app.post("/v1/check")
    async def check() -> Response:
        async with check_lock:
            return json_response(await cache.examiner.examine_all())

    @app.post("/v1/prefetch")
    async def prefetch(request: Request) -> Response:
        body = await read_json(request, PrefetchBody)
        leases.check_tenant(require_dns_label(body.tenant, "tenant"), body.version)
        cache.prefetcher.start_prefetch(PrefetchRequest(body.tenant, body.version, body.tier, body.urgent))
        return Response(status_code=202)

    return app


def list_rates(cache: Cache) -> dict[str, TierRate]:
    """Return the speed of each tier below the host's, as learned from loads."""
    return {
        tier: TierRate(bytes_per_s=rate.bytes_per_s, fixed_s=rate.fixed_s, loads=rate.loads)
        for tier, rate in cache.version_loader.tier_model.by_tier.items()
    }


def list_damages(cache: Cache, leases: LeaseServer) -> tuple[Damaged, ...]:
    """Return the chunks that were found damaged in memory, if living processes may have them mapped."""
    found = ((each, leases.pids_mapping(each.digest, each.place)) for each in cache.examiner.damaged_chunks())
    return tuple(Damaged(tenant=each.tenant, chunk=each.digest, pids=pids) for each, pids in found if pids)


def state_of(cache: Cache, leases: LeaseServer) -> State:
    """Return the agent's state for operators."""
    index, slabs, counters = cache.arena.index, cache.arena.pool.counts, cache.counters
    chunks, in_use = index.ready_totals
    return State(
        host=HostState(
            bytes=in_use,
            budget_bytes=index.max_slabs * index.slab_bytes,
            chunks=chunks,
            versions=cache.version_loader.hot_count,
            slab_bytes=index.slab_bytes,
            slabs_used=index.slab_count,
            slabs_busy=index.busy_count,
            slabs_free=slabs["free"],
            slabs_huge=slabs["huge"],
            slabs_quota=index.quota,
            slabs_by_tenant=dict(index.slabs_by_tenant),
            loading=cache.loader.loading_count,
        ),
        nvme=NvmeState(
            bytes=cache.nvme.index.total_bytes,
            budget_bytes=cache.nvme.index.budget_bytes,
            quota_bytes=cache.nvme.index.quota_bytes,
            bytes_by_tenant=cache.nvme.index.bytes_by_tenant,
            chunks=cache.nvme.index.file_count,
            recognised_bytes=cache.nvme.recognised_bytes,
            bytes_by_way={str(way): nbytes for way, nbytes in cache.nvme.bytes_by_read_path.items()},
        ),
        prefetches=PrefetchState(
            running=cache.prefetcher.running_count,
            waiting=cache.prefetcher.waiting_count,
            done=counters.prefetched,
            gave_way=counters.prefetches_gave_way,
            failed=dict(counters.prefetches_failed),
        ),
        connections=leases.connection_count,
        leases=leases.lease_count,
        holders=leases.holder_count,
        leases_granted=counters.leases_granted,
        leases_hot=counters.leases_hot,
        leases_refused=dict(counters.leases_refused),
        strangers=counters.strangers,
        examined_chunks=dict(counters.examined_chunks),
        sweeps=counters.scrub_passes,
        damaged=list_damages(cache, leases),
        chunk_reads=dict(counters.chunk_reads),
        bytes_read=dict(counters.bytes_read),
        chunk_faults=plain(counters.chunk_faults),
        manifest_faults=plain(counters.manifest_faults),
        attestation_faults=plain(counters.attestation_faults),
        unverified_versions=counters.unverified_versions,
        healed_chunks=dict(counters.healed_chunks),
        healed_manifests=dict(counters.healed_manifests),
        refused_chunks=dict(counters.refused_chunks),
        admitted_chunks=counters.admitted_chunks,
        unadmitted_chunks=counters.unadmitted_chunks,
        unkept_chunks=counters.unkept_chunks,
        chunks_to_admit=cache.admissions.waiting_count,
        reads_running=cache.fetcher.scheduler.running,
        chunks_queued=cache.fetcher.scheduler.queued,
        hedges=counters.hedges,
        hedges_won=counters.hedges_won,
        unreadable_packs=cache.store_tier.unreadable_packs,
        rates=list_rates(cache),
        peers=peer_state(cache.peer_node, counters),
    )
