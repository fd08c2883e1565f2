"""This node as a peer of others: the source for its loads, the shared store, and the port that serves other nodes."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp

from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.wire import Wire
from kelvin.crypto.node_tls import NodeTls
from weightcache.app.settings import PeerSettings
from weightcache.counters import Counters
from weightcache.fetch.fetcher import MAX_OWNER_WAITS
from weightcache.host.arena import Arena
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.peers.peer_client import Peer
from weightcache.peers.peer_group import PeerGroup
from weightcache.peers.peer_server import PeerExports, PeerServer
from weightcache.peers.peer_tier import MAX_PEER_READS, PeerTier, SharedStore
from weightcache.sources.source import Source
from weightcache.sources.verifier import Verifier

BACKLOG: Final = 256
CONNECTIONS: Final = MAX_PEER_READS + MAX_OWNER_WAITS + 8  # per node: for chunks, waits, and lookups of many chunks
KEEPALIVE_S: Final = 30.0  # less than the other end's keep-alive


class PeerFact(Wire, frozen=True):
    """Another node, as seen by this one. `answers`: it may be called now, whether or not it ever answered."""

    url: str
    answers: bool
    bytes_per_s: float | None


class PeerState(Wire, frozen=True):
    """The other nodes, and the number of chunks and bytes sent to them since the start.

    `refused` responses and connections were over a limit; `cut` responses were too slow or lost their client;
    `strangers` are failed TLS handshakes.
    """

    nodes: tuple[PeerFact, ...]
    sent_chunks: int
    sent_bytes: int
    refused: int
    cut: int
    strangers: int


@dataclass(frozen=True, slots=True)
class PeerNode:
    """The parts of an open peer, valid inside the block of `open_peers`. `store` is shared by all nodes."""

    tier: PeerTier
    store: SharedStore
    exports: PeerExports
    tls: NodeTls


@asynccontextmanager
async def open_peers(
    settings: PeerSettings, arena: Arena, nvme: NvmeTier, store: Source, verifier: Verifier, counters: Counters
) -> AsyncIterator[PeerNode | None]:
    """Open the client side for peers. Yields None if no peers are configured."""
    if not settings.secrets:
        yield None
        return
    tls, clock = NodeTls(settings.secrets), asyncio.get_running_loop().time
    exports = PeerExports(arena, nvme, verifier, counters)
    connector = aiohttp.TCPConnector(
        ssl=tls.client_context(), limit=0, limit_per_host=CONNECTIONS, keepalive_timeout=KEEPALIVE_S
    )
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        peers = [Peer(url, session, clock) for url in settings.urls]
        group = PeerGroup(secrets.token_hex(8), peers, exports.has_chunk, clock, is_serving=settings.listen is not None)
        tier = PeerTier(group, lambda *key: nvme.index.is_readable(key))
        try:
            yield PeerNode(tier, SharedStore(store, group), exports, tls)
        finally:
            await group.close()


@asynccontextmanager
async def serve_peers(settings: PeerSettings, peer_node: PeerNode | None, counters: Counters) -> AsyncIterator[None]:
    """Serve other nodes while the block runs, if configured. Raises BadSetting for an address that is not ours."""
    if peer_node is None or settings.listen is None:
        yield
        return
    server = PeerServer(
        _listener(settings.listen), peer_node.tls.server_context(), peer_node.exports, peer_node.tier.group, counters
    )
    server.open()
    try:
        yield
    finally:
        await server.close()


def peer_state(peer_node: PeerNode | None, counters: Counters) -> PeerState:
    """Return the state of peers for operators."""
    peers = [] if peer_node is None else peer_node.tier.group.peers
    return PeerState(
        nodes=tuple(
            PeerFact(url=peer.url, answers=peer.is_available, bytes_per_s=peer.throughput.bytes_per_s) for peer in peers
        ),
        sent_chunks=counters.peer_sent_chunks,
        sent_bytes=counters.peer_sent_bytes,
        refused=counters.peer_refusals,
        cut=counters.peer_cuts,
        strangers=counters.peer_strangers,
    )


def _listener(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        shown = f"{address[0]}:{address[1]}"
        raise BadSetting("KELVIN_PEER_LISTEN", shown, f"can't be listened on: {error.strerror}") from error
