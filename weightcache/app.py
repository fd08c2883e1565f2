"""The composition root of the cache agent: settings in, two sockets out."""

import asyncio
import socket

from blobstore.factory import open_checked_store
from blobstore.store import BlobStore
from service.run import serve_until
from service.unix import SocketDirectory
from telemetry.telemetry import open_without_traces
from weightcache.api import make_app, state_of
from weightcache.cache import open_cache
from weightcache.leases import LeaseServer
from weightcache.meters import describe_cache
from weightcache.peering import serving_peers
from weightcache.settings import CacheSettings
from weightcache.sources import Verify, is_digest_of
from weightcache.wire import SOCKET

HTTP_SOCKET = "cache.sock"
SPARE_CONNECTIONS = 8  # for manifests, and for reads that are asked a second time


async def run(settings: CacheSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises BlockingIOError where another agent has the directory, BadSetting over the store."""
    connections = settings.store_reads + SPARE_CONNECTIONS
    async with open_checked_store(settings.store_url, writes=False, connections=connections) as store:
        await serve(settings, store, stop)


async def serve(
    settings: CacheSettings, store: BlobStore, stop: asyncio.Event, *, verify: Verify = is_digest_of
) -> None:
    """As `run`, over a given store."""
    directory, telemetry = SocketDirectory(settings.run), open_without_traces("weightcache")
    try:
        async with (
            open_cache(settings, store, verify=verify) as cache,
            serving_peers(settings.peers, cache.peering, cache.counters),
        ):
            leases = LeaseServer(
                directory.listen(SOCKET, socket.SOCK_SEQPACKET),
                cache.residents,
                cache.arena,
                cache.counters,
                settings.tenant,
            )
            describe_cache(telemetry.page, lambda: state_of(cache, leases))
            leases.open()
            app = telemetry.with_metrics_route(make_app(cache, leases))
            try:
                await serve_until(app, directory.listen(HTTP_SOCKET), stop)
            finally:
                await leases.close()
    finally:
        directory.close()
