"""Ask the installation's other processes for their health, their metrics, and the weight cache's state."""

import asyncio
import logging
import os
from collections.abc import Iterable
from typing import Final, Literal

import aiohttp
import msgspec

from controlplane import dependencies
from controlplane.api.types.admin_types import CacheCheck, CacheStatus, DiskStatus, ProcessStatus
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.warmth.prefetch_requests import PrefetchRequest
from kelvin.contracts.artifacts.filter_api import FILTERS_SOCKET as FILTERS
from kelvin.contracts.errors import NotFound, Refused, Unavailable
from kelvin.contracts.serving.start_forecast import TierPlacement
from kelvin.contracts.wire import Wire, decode, encode
from kelvin.ipc.forked_process import socket_name
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.zygote_client import ZygoteClient
from kelvin.process.exit_log import REPLICAS, ProcessExits, read_exits

log = logging.getLogger(__name__)

SIBLING_LIMIT_S: Final = dependencies.SIBLINGS.timeout_s
EVICTION_LIMIT_S: Final = dependencies.EVICTION.timeout_s
CHECK_LIMIT_S: Final = dependencies.EXAMINATION.timeout_s
CACHE: Final = "cache"
_SOCKETS: Final = {"activator": "activator.sock", CACHE: "cache.sock", "snapshotter": "snapshotter.sock"}


class Evict(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /admin/v1/cache/evict`. Without a version, everything of the caller's tenant is evicted."""

    tier: Literal["host", "nvme"]
    version: str | None = None
    tenant: str | None = None


def limit_to_tenant(tenant: str, evict: Evict) -> Evict:
    """Return the eviction with its tenant set to the caller's. Raises Refused(NotFound) if it names another tenant."""
    if evict.tenant not in (None, tenant):
        raise Refused(NotFound("tenant", str(evict.tenant)[:80]))
    return Evict(tier=evict.tier, version=evict.version, tenant=tenant)


class _DamagedChunk(msgspec.Struct):
    """The fields of a damaged chunk that are used here."""

    pids: frozenset[int]


class _DamageReport(msgspec.Struct):
    """The weight cache's answer about damaged memory."""

    damaged: tuple[_DamagedChunk, ...]


def _with_exits(status: ProcessStatus, exits: ProcessExits | None) -> ProcessStatus:
    if exits is None:
        return status
    return msgspec.structs.replace(status, exits=exits.count, last_exit_at_s=exits.last_at_s, last_exit=exits.last)


class SiblingProcesses:
    """HTTP clients of the sibling processes. Close it where you opened it."""

    def __init__(self, directory: SocketDirectory, zygote: ZygoteClient, *, filters: bool = False) -> None:
        self._directory = directory
        self._zygote = zygote
        sockets = _SOCKETS | {"filters": FILTERS} if filters else _SOCKETS
        self._clients = {name: ServiceClient(directory, socket, name) for name, socket in sockets.items()}

    def __repr__(self) -> str:
        return f"<SiblingProcesses {sorted(self._clients)}>"

    @property
    def names(self) -> frozenset[str]:
        """Names of the siblings that are asked over HTTP."""
        return frozenset(self._clients)

    async def statuses(self) -> tuple[ProcessStatus, ...]:
        """Return the status of all processes by name, this one included. All are asked at once."""
        own = ProcessStatus(name="controlplane", healthy=True, ready=await self.zygote_answers())
        asked = await asyncio.gather(*(self._status(name) for name in self._clients))
        zygote = ProcessStatus(name="zygote", healthy=own.ready, ready=own.ready)
        exits = await asyncio.to_thread(self._exits)
        found = sorted((own, zygote, *asked), key=lambda each: each.name)
        return tuple(_with_exits(each, exits.get(each.name)) for each in found)

    async def replica_exits(self) -> ProcessExits | None:
        """Return how replicas and standbys ended that were killed because they hung; None if there were none."""
        return (await asyncio.to_thread(self._exits)).get(REPLICAS)

    async def disk(self) -> DiskStatus | None:
        """Return the free space on the disk of the run directory, which lies in the data directory. None if unknown."""
        try:
            found = await asyncio.to_thread(os.statvfs, self._directory.path)
        except OSError as error:
            log.warning("the free disk space can't be read", extra={"error": repr(error)})
            return None
        block, inodes = found.f_frsize, found.f_favail if found.f_files else None
        return DiskStatus(free_bytes=found.f_bavail * block, total_bytes=found.f_blocks * block, free_inodes=inodes)

    def _exits(self) -> dict[str, ProcessExits]:
        try:
            return read_exits(self._directory.path)
        except (OSError, Refused) as error:
            log.warning("how processes ended can't be read", extra={"error": repr(error)})
            return {}

    async def zygote_answers(self) -> bool:
        """Return whether the zygote answers, so that new standbys can be forked."""
        try:
            await self._zygote.ping(SIBLING_LIMIT_S)
        except Refused:
            return False
        return True

    async def cache_state(self) -> bytes:
        """Return the cache agent's own answer, as JSON. Raises Refused."""
        return await self._cache_state(EVICTION_LIMIT_S)

    async def try_cache_status(self) -> CacheStatus | None:
        """Return the faults that the weight cache has found; None if it does not answer."""
        try:
            return decode(await self._cache_state(SIBLING_LIMIT_S), CacheStatus, field="state of the weight cache")
        except Refused:
            return None

    async def whereabouts(self, key: VersionKey) -> TierPlacement:
        """Return in which tiers the version's bytes are. Raises Refused."""
        path = f"/v1/whereabouts?tenant={key.tenant}&version={key.version}"
        return await self._clients[CACHE].call("GET", path, TierPlacement, timeout_s=SIBLING_LIMIT_S)

    async def _cache_state(self, timeout_s: float) -> bytes:
        try:
            async with self._clients[CACHE].open("GET", "/v1/state", timeout_s=timeout_s) as answer:
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:  # it died in the middle of its answer
            raise Refused(Unavailable(CACHE)) from error

    async def damaged_pids(self) -> frozenset[int]:
        """Return the processes that have damaged memory of the weight cache mapped. Raises Refused."""
        found = (
            await self._clients[CACHE].call("GET", "/v1/damages", _DamageReport, timeout_s=SIBLING_LIMIT_S)
        ).damaged
        return frozenset[int]().union(*(row.pids for row in found))

    async def check_cache(self) -> CacheCheck:
        """Have the weight cache hash all that it holds. Raises Refused."""
        return await self._clients[CACHE].call("POST", "/v1/check", CacheCheck, timeout_s=CHECK_LIMIT_S)

    async def metrics(self, runtimes: Iterable[str]) -> dict[str, str | None]:
        """Return the metrics page of each sibling by name, and of these runtimes by id; None if it does not answer."""
        asked = {name: self._page(client) for name, client in self._clients.items()}
        asked |= {runtime_id: self._page_of_runtime(runtime_id) for runtime_id in runtimes}
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    async def _page_of_runtime(self, runtime_id: str) -> str | None:
        client = ServiceClient(self._directory, socket_name(runtime_id), "the runtime", limit=1)
        try:
            return await self._page(client)
        finally:
            await client.close()

    async def _page(self, client: ServiceClient) -> str | None:
        try:
            async with client.open("GET", "/metrics", timeout_s=SIBLING_LIMIT_S) as answer:
                return (await answer.read()).decode()
        except (Refused, aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def evict(self, evict: Evict) -> None:
        """Evict a tenant's bytes from a tier. Raises Refused, with Conflict if they are leased."""
        async with self._clients[CACHE].open("POST", "/v1/evict", payload=encode(evict), timeout_s=EVICTION_LIMIT_S):
            pass

    async def prefetch(self, request: PrefetchRequest) -> None:
        """Have the weight cache prefetch a version. Returns once the prefetch has begun. Raises Refused."""
        async with self._clients[CACHE].open(
            "POST", "/v1/prefetch", payload=encode(request), timeout_s=SIBLING_LIMIT_S
        ):
            pass

    async def close(self) -> None:
        """Close the clients' kept connections."""
        for client in self._clients.values():
            await client.close()

    async def _status(self, name: str) -> ProcessStatus:
        healthy, ready = await asyncio.gather(self._is_answering(name, "/healthz"), self._is_answering(name, "/readyz"))
        return ProcessStatus(name=name, healthy=healthy, ready=ready)

    async def _is_answering(self, name: str, path: str) -> bool:
        try:
            async with self._clients[name].open("GET", path, timeout_s=SIBLING_LIMIT_S):
                return True
        except Refused:
            return False
