"""The composition root of the cache agent. It serves two sockets."""

import asyncio
import socket

from kelvin.blobstore.blob_store import BlobStore
from kelvin.blobstore.store_factory import open_checked_store
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.service_lifecycle import serve_until
from kelvin.telemetry.telemetry import open_without_traces
from weightcache.app.api import make_app, state_of
from weightcache.app.cache import open_cache
from weightcache.app.lease_server import LeaseServer
from weightcache.app.metrics import describe_cache
from weightcache.app.peer_node import serve_peers
from weightcache.app.settings import CacheSettings
from weightcache.client.lease_protocol import SOCKET
from weightcache.sources.source import Verify, is_digest_of

HTTP_SOCKET = "cache.sock"
SPARE_CONNECTIONS = 8  # connections for manifests and hedged reads


async def run(settings: CacheSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises BlockingIOError if another agent has the directory, BadSetting for the
    store, KELVIN_VERIFY without a key, or KELVIN_PEER_LISTEN.
    """
    connections = settings.store_reads + SPARE_CONNECTIONS
    async with open_checked_store(settings.store_url, writes=False, connections=connections) as store:
        await serve(settings, store, stop)


async def serve(
    settings: CacheSettings, store: BlobStore, stop: asyncio.Event, *, verify: Verify = is_digest_of
) -> None:
    """Serve as `run` does, from the given store."""
    directory, telemetry = SocketDirectory(settings.run), open_without_traces("weightcache")
    try:
        async with (
            open_cache(settings, store, verify=verify) as cache,
            serve_peers(settings.peers, cache.peer_node, cache.counters),
        ):
            leases = LeaseServer(
                directory.listen(SOCKET, socket.SOCK_SEQPACKET),
                cache.version_loader,
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
