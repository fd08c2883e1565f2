"""The peer port bounds its connections, its concurrent answers and their bytes, and cuts clients that do not read."""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from kelvin.contracts.errors import NotFound, Refused
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.crypto.node_tls import NodeTls
from tests.eventually import eventually
from tests.loop_thread import HOST
from tests.weightcache.kit import HUGE, TENANT, make_version, open_test_cache, settings_of
from tests.weightcache.peer_kit import SECRET
from weightcache.app.cache import Cache
from weightcache.peers.peer_group import PeerGroup
from weightcache.peers.peer_protocol import chunk_path, query_path
from weightcache.peers.peer_server import PeerExports, PeerServer
from weightcache.sources.source import is_digest_of
from weightcache.sources.verifier import Verifier

VERSION = make_version(seed=23, pages=(2048, 3), chunk_pages=2048)
LARGE = max(VERSION.manifest.chunks, key=lambda chunk: chunk.length)
SMALL = min(VERSION.manifest.chunks, key=lambda chunk: chunk.length)
TLS = NodeTls([SECRET])


def open_full_cache(tmp_path: Path) -> AbstractAsyncContextManager[Cache]:
    """Open a cache that has the version in memory and on disk."""
    return open_test_cache(settings_of(tmp_path, slab_bytes=8 * HUGE), VERSION)


def exports_of(cache: Cache, **bounds: int) -> PeerExports:
    verifier = Verifier(None, is_digest_of, cache.counters)  # type: ignore[arg-type]
    return PeerExports(cache.arena, cache.nvme, verifier, cache.counters, **bounds)


@asynccontextmanager
async def port(cache: Cache, **bounds: float) -> AsyncIterator[tuple[PeerServer, int]]:
    """Run the product's server with the test's bounds. Yield it and its port."""
    listener = socket.create_server((HOST, 0))
    number = listener.getsockname()[1]
    group = PeerGroup("me", (), lambda *_: False, asyncio.get_running_loop().time, is_serving=True)
    server = PeerServer(listener, TLS.server_context(), exports_of(cache), group, cache.counters, **bounds)  # type: ignore[arg-type]
    server.open()
    try:
        yield server, number
    finally:
        await server.close()


@pytest.mark.uvloop
async def test_client_that_does_not_read_is_cut(tmp_path: Path) -> None:
    """The connection of a client that requests a chunk and does not read it is closed, and the chunk is unpinned."""

    async with open_full_cache(tmp_path) as cache, port(cache, stall_s=0.1) as (server, number):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(sock.connect, (HOST, number))
        with await asyncio.to_thread(TLS.client_context().wrap_socket, sock) as secure:
            request = f"GET {chunk_path(TENANT, LARGE.digest)} HTTP/1.1\r\nhost: x\r\n\r\n"
            await asyncio.to_thread(secure.sendall, request.encode())
            exports = server._exports
            await eventually(lambda: cache.counters.peer_cuts and not exports.sending_count and not server.connections)
        assert server._exports.sending_bytes == 0
        assert cache.arena.evict(None, None) == 0, "a chunk stays pinned"


@pytest.mark.uvloop
async def test_client_that_does_not_send_its_body_is_cut(tmp_path: Path) -> None:
    """A client that announces a body and does not send it is disconnected after `stall_s`."""
    async with open_full_cache(tmp_path) as cache, port(cache, stall_s=0.1) as (server, number):
        reader, writer = await asyncio.open_connection(HOST, number, ssl=TLS.client_context())
        writer.write(f"POST {query_path(TENANT)} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
        await eventually(lambda: cache.counters.peer_cuts and not server.connections)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        assert await reader.read() == b""


@pytest.mark.uvloop
async def test_connections_are_bounded(tmp_path: Path) -> None:
    """A connection over the limit is closed at once. When one ends, the next is served."""

    async with open_full_cache(tmp_path) as cache, port(cache, max_connections=2) as (server, number):
        two = [await asyncio.open_connection(HOST, number, ssl=TLS.client_context()) for _ in range(2)]
        # wait, because a client finishes its handshake before the server does
        await eventually(lambda: len(server._server.connections) == 2)
        with pytest.raises((OSError, ssl.SSLError)):
            await asyncio.open_connection(HOST, number, ssl=TLS.client_context())
        assert cache.counters.peer_refusals == 1
        two[0][1].close()
        await eventually(lambda: server.connections == 1)
        reader, writer = await asyncio.open_connection(HOST, number, ssl=TLS.client_context())
        path = chunk_path(TENANT, SMALL.digest)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert b"200 OK" in await reader.readline()
        for each in (two[1][1], writer):
            each.close()
            with suppress(OSError):
                await each.wait_closed()


async def test_answers_are_bounded(tmp_path: Path) -> None:
    """Concurrent answers are bounded in number and bytes. A larger one runs alone. Chunks in answers are pinned."""

    async with open_full_cache(tmp_path) as cache:
        one_at_a_time = exports_of(cache, max_sends=1)
        async with one_at_a_time.open_chunk(TENANT, SMALL.digest) as chunk:
            assert is_digest_of(chunk, SMALL.digest)
            assert cache.arena.evict(None, None) > 0, "the chunk is not pinned"
            with pytest.raises(Refused) as refused:
                async with one_at_a_time.open_chunk(TENANT, LARGE.digest):
                    pass
            assert isinstance(refused.value.failure, Overloaded)
        few_bytes = exports_of(cache, max_sending_bytes=SMALL.length)
        async with few_bytes.open_chunk(TENANT, LARGE.digest), asyncio.timeout(30):
            with pytest.raises(Refused):
                async with few_bytes.open_chunk(TENANT, SMALL.digest):
                    pass
        assert (
            one_at_a_time.sending_count,
            one_at_a_time.sending_bytes,
            few_bytes.sending_count,
            few_bytes.sending_bytes,
        ) == (0, 0, 0, 0)
        assert cache.arena.evict(None, None) == 0
        async with one_at_a_time.open_chunk(TENANT, LARGE.digest) as chunk:
            assert is_digest_of(chunk, LARGE.digest), "the disk's bytes are wrong"
        await cache.nvme.evict(None, None, None)
        with pytest.raises(Refused) as refused:
            async with one_at_a_time.open_chunk(TENANT, LARGE.digest):
                pass
        assert isinstance(refused.value.failure, NotFound)


async def test_empty_file_is_no_chunk(tmp_path: Path) -> None:
    """An empty chunk file is quarantined when a peer asks for it, like any other file with wrong bytes."""
    path = tmp_path / "cache" / TENANT / SMALL.digest[:2] / SMALL.digest
    path.parent.mkdir(parents=True)
    path.touch()
    async with open_test_cache(settings_of(tmp_path)) as cache:
        assert cache.nvme.index.is_readable((TENANT, SMALL.digest))
        with pytest.raises(Refused) as refused:
            async with exports_of(cache).open_chunk(TENANT, SMALL.digest):
                pass
        assert isinstance(refused.value.failure, NotFound)
        assert not cache.nvme.index.is_readable((TENANT, SMALL.digest))
        assert not path.exists()


async def test_disk_that_does_not_answer_has_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer can ask another source at once. The file stays, because the error says nothing about it."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    async with open_full_cache(tmp_path) as cache:
        assert cache.arena.evict(None, None) == 0
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(Refused) as refused:
            async with exports_of(cache).open_chunk(TENANT, SMALL.digest):
                pass
        assert isinstance(refused.value.failure, NotFound)
        assert cache.nvme.index.is_readable((TENANT, SMALL.digest))
