"""Serve this node's chunks to other nodes: which chunks may be sent, and the port that sends them.

Chunks of the host tier are verified already; chunks of NVMe are verified before they are sent. A chunk stays in place
while it is being sent. The number and bytes of chunks being sent are limited.

The port speaks HTTP/1.1 over mutual TLS. Connections, bytes, and the duration of requests and responses are limited. A
node may keep an idle connection. Without a node's certificate, the TLS handshake fails.
"""

import asyncio
import logging
import mmap
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from aiohttp.web_request import BaseRequest

from kelvin.contracts.errors import Failure, Internal, InvalidRequest, MethodNotAllowed, NotFound, Refused
from kelvin.contracts.names import is_digest, require_dns_label
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, headers_of, problem_details
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.tls_acceptor import CLOSE_S, TlsAcceptor
from kelvin.process.request_context import REQUEST_ID, set_request_context
from weightcache.counters import Counters
from weightcache.host.arena import Arena
from weightcache.nvme.nvme_tier import NvmeTier
from weightcache.peers.peer_group import PeerGroup
from weightcache.peers.peer_protocol import ChunkQuery
from weightcache.sources.policy.healing import GOOD_OUTCOMES
from weightcache.sources.verifier import Verifier

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512
IDLE_S: Final = 75.0  # longest idle time of a kept connection
PIECE_BYTES: Final = 256 << 10  # encrypted at once: about 0.2 ms of the event loop
SEND_STALL_S: Final = 5.0  # longest time to send one piece; then the reader is cut off
SLOWEST_BYTES_PER_S: Final = 1 << 20

MAX_SENDS: Final = 64  # responses
MAX_SENDING_BYTES: Final = 512 << 20  # bytes of chunks; a larger chunk is sent alone
RETRY_S: Final = 1.0


class PeerExports:
    """The chunks of one agent's tiers that other nodes may read."""

    def __init__(
        self, arena: Arena, nvme: NvmeTier, verifier: Verifier, counters: Counters, *,
        max_sends: int = MAX_SENDS, max_sending_bytes: int = MAX_SENDING_BYTES,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._nvme = nvme
        self._verifier = verifier
        self._counters = counters
        self._max_sends = max_sends
        self._max_sending_bytes = max_sending_bytes
        self.sending_count = 0
        self.sending_bytes = 0

    def __repr__(self) -> str:
        sends, nbytes = f"{self.sending_count}/{self._max_sends}", f"{self.sending_bytes}/{self._max_sending_bytes}"
        return f"<PeerExports sends={sends} bytes={nbytes}>"

    def has_chunk(self, tenant: str, digest: str) -> bool:
        """Return whether the chunk would be sent."""
        return self._arena.index.is_ready(tenant, digest) or self._nvme.index.is_readable((tenant, digest))

    @asynccontextmanager
    async def open_chunk(self, tenant: str, digest: str) -> AsyncIterator[memoryview]:
        """Yield the chunk's verified bytes, read-only. Raises `Refused`: NotFound, Overloaded."""
        if not self.has_chunk(tenant, digest):
            raise Refused(NotFound("chunk", digest))
        place = self._arena.index.try_place(tenant, digest)
        length = self._nvme.index.length((tenant, digest)) if place is None else place.length
        are_sends_used = self.sending_count >= self._max_sends
        if are_sends_used or (self.sending_count and self.sending_bytes + length > self._max_sending_bytes):
            self._counters.peer_refusals += 1
            limit, unit = (self._max_sends, "chunks") if are_sends_used else (self._max_sending_bytes, "bytes")
            raise Refused(Overloaded("the send window for other nodes", limit, RETRY_S, unit))
        self.sending_count, self.sending_bytes = self.sending_count + 1, self.sending_bytes + length
        try:
            if place is None:
                # A mapping can't be empty, although a file may be: such a file is then found faulty, like any other.
                # The mapping is not closed here, because the traceback of a failed read may still hold views of it.
                view = memoryview(mmap.mmap(-1, max(length, 1)))[:length]
                try:
                    outcome = await self._nvme.fetch(tenant, digest, view)
                except Refused as error:  # the disk fails, so let the peer use another source at once
                    raise Refused(NotFound("chunk", digest)) from error
                if await self._verifier.verify_read(self._nvme, outcome, tenant, digest, view) not in GOOD_OUTCOMES:
                    raise Refused(NotFound("chunk", digest))
                yield view.toreadonly()
            else:
                self._arena.index.pin((place.slab,))
                try:
                    yield (await self._arena.view(place)).toreadonly()
                finally:
                    self._arena.unpin((place.slab,))
        finally:
            self.sending_count, self.sending_bytes = self.sending_count - 1, self.sending_bytes - length


class PeerServer:
    """Serves `listener` (TCP) from `open` to `close`."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, exports: PeerExports, group: PeerGroup, counters: Counters,
        *, stall_s: float = SEND_STALL_S, max_connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        self._exports = exports
        self._group = group
        self._counters = counters
        self._stall_s = stall_s
        self._server = web.Server(
            self._answer, handler_cancellation=True, keepalive_timeout=IDLE_S, lingering_time=0.0, access_log=None
        )
        self._acceptor = TlsAcceptor(
            listener, tls, self._server,
            is_full=lambda: len(self._server.connections) >= max_connections, on_refused=self._refuse,
        )  # fmt: skip

    @property
    def connections(self) -> int:
        """Return the number of connections, including those in their handshake."""
        return len(self._server.connections) + self._acceptor.handshakes

    def open(self) -> None:
        """Start to accept connections on the listener."""
        self._acceptor.open()

    async def close(self) -> None:
        """Close the listener and all connections."""
        await self._acceptor.close()
        self._server.pre_shutdown()
        await self._server.shutdown(CLOSE_S)
        await self._acceptor.end()

    def _refuse(self, error: OSError | None) -> None:
        if error is None:
            self._counters.peer_refusals += 1
            return
        self._counters.peer_strangers += 1
        log.warning("a TLS handshake of a peer failed", extra={"error": type(error).__name__})

    async def _answer(self, request: BaseRequest) -> web.StreamResponse:
        if (request_id := request.headers.get(REQUEST_ID)) is not None:
            set_request_context(request_id)
        try:
            return await self._route(request)
        except Refused as refused:
            return _problem(refused.failure)
        except (ConnectionError, TimeoutError):
            self._cut(request)
            return web.Response()  # sent nowhere: the connection is gone
        except Exception:
            log.exception("unforeseen failure", extra={"path": request.path})
            return _problem(Internal())

    async def _route(self, request: BaseRequest) -> web.StreamResponse:
        parts = request.path.split("/")
        if len(parts) != 5 or parts[:3] != ["", "v1", "chunks"]:
            raise Refused(NotFound("route", request.path[:80]))
        tenant, name = require_dns_label(parts[3], "tenant"), parts[4]
        method = "POST" if name == "have" else "GET"
        if request.method != method:
            raise Refused(MethodNotAllowed(request.method, (method,)))
        if name == "have":
            async with asyncio.timeout(self._stall_s):
                body = await request.read()
            return await self._answer_query(tenant, decode(body, ChunkQuery))
        digest = _digest(name)
        async with self._exports.open_chunk(tenant, digest) as chunk:
            return await self._send(request, chunk)

    async def _answer_query(self, tenant: str, query: ChunkQuery) -> web.Response:
        found = await self._group.answer_query(tenant, query)
        return web.Response(body=encode(found), content_type="application/json")

    async def _send(self, request: BaseRequest, chunk: memoryview) -> web.StreamResponse:
        """Send the chunk, or the requested range of it (RFC 9110, 14)."""
        chunk_bytes = chunk.nbytes
        first, last = _range(request, chunk_bytes)
        if first > last:
            return web.Response(status=416, headers={"content-range": f"bytes */{chunk_bytes}"})
        response = web.StreamResponse(status=206 if "range" in request.headers else 200)
        response.content_type = "application/octet-stream"
        response.content_length = last + 1 - first
        if response.status == 206:
            response.headers["content-range"] = f"bytes {first}-{last}/{chunk_bytes}"
        async with asyncio.timeout(self._stall_s + (last + 1 - first) / SLOWEST_BYTES_PER_S):
            await response.prepare(request)
            for begin in range(first, last + 1, PIECE_BYTES):
                # Copy the piece: the transport may still hold it after the slab is given back.
                piece = bytes(chunk[begin : min(begin + PIECE_BYTES, last + 1)])
                async with asyncio.timeout(self._stall_s):
                    await response.write(piece)
                self._counters.peer_sent_bytes += len(piece)
            await response.write_eof()
        self._counters.peer_sent_chunks += 1
        return response

    def _cut(self, request: BaseRequest) -> None:
        """Abort the connection of a node that is too slow or gone, including buffered bytes."""
        self._counters.peer_cuts += 1
        if request.transport is not None:
            request.transport.abort()


def _digest(text: str) -> str:
    if not is_digest(text):
        raise Refused(InvalidRequest("digest", repr(text[:80]), "must be 64 hexadecimal digits"))
    return text


def _range(request: BaseRequest, size: int) -> tuple[int, int]:
    """Return the first and last byte. If there is no such range, first is above last."""
    try:
        requested = request.http_range
    except ValueError:
        raise Refused(
            InvalidRequest("range", repr(request.headers["range"][:80]), "must be bytes=FIRST-LAST")
        ) from None
    begin, end, _ = requested.indices(size)
    if requested.start is not None and requested.start >= size:
        return size, size - 1
    return begin, end - 1


def _problem(failure: Failure) -> web.Response:
    return web.Response(
        body=problem_details(failure),
        status=failure.status,
        headers=headers_of(failure),
        content_type=PROBLEM_CONTENT_TYPE,
    )
