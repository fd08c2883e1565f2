"""HTTP/1.1 to one replica over kept connections, and no more of it than replicas of ours speak.

A request's head and body leave in one write; an answer is read no faster than it is asked for. Everything that goes
wrong is an OSError. Why not a library's client: docs/design/0022-upstream-http.md.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable
from typing import Final, cast

import httptools

from activator import dependencies
from kelvin.ipc.connector import Connector

BUFFER: Final = 64 << 10
CONNECT_S: Final = dependencies.REPLICA.timeout_s
KEEP_S: Final = 30.0  # less than a replica keeps an idle connection
LARGE: Final = 1 << 20  # from here on a body is not copied behind its head

Fields = Iterable[tuple[str, str]]


class Client:
    """Connections to one replica: as many as there are requests under way, and those that wait for the next one."""

    def __init__(self, way: Connector, *, keep_s: float = KEEP_S) -> None:
        self._way = way
        self._keep_s = keep_s
        self._idle: list[_Connection] = []  # the one that was used last is at the end
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Client {self._way} idle={len(self._idle)}>"

    async def send(self, method: str, target: str, body: bytes = b"", fields: Fields = ()) -> "UpstreamResponse":
        """The head of the answer. Raises OSError. Cancelling closes the connection."""
        answer = await self.ask(method, target, body, fields)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    async def ask(self, method: str, target: str, body: bytes = b"", fields: Fields = ()) -> "UpstreamResponse":
        """Send a request, and return its answer before there is anything of it: its head is next. Raises OSError."""
        first = f"{method} {target} HTTP/1.1\r\nhost: replica\r\ncontent-length: {len(body)}"
        head = "\r\n".join((first, *map(": ".join, fields), "\r\n")).encode()
        connection = self._try_kept() or await self._connect()
        connection.ask(head, body)
        return UpstreamResponse(self, connection)

    def close(self) -> None:
        """End what waits; a connection in use ends when its answer is released."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def keep(self, connection: "_Connection") -> None:
        """For the next request."""
        if self._is_closed:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def _try_kept(self) -> "_Connection | None":
        """The one that was used last. Where that one has waited for too long, all have."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since_s < self._keep_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        if self._is_closed:
            raise ConnectionAbortedError("this client is closed")
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._way.connect(_Connection)
        except TimeoutError:
            raise ConnectionRefusedError(f"no connection within {CONNECT_S:g} s") from None


class UpstreamResponse:
    """One answer. Wait for its head first; give it back by `release`, or end its connection by `close`."""

    def __init__(self, client: Client, connection: "_Connection") -> None:
        self._client = client
        self._connection = connection
        self._is_left = False
        self.status = 0  # before there is a head
        self.fields: dict[bytes, bytes] = {}  # names in lower case

    async def head(self) -> None:
        """Wait for status and fields. Raises OSError. Safe to cancel, and to wait for again."""
        while not self._connection.has_head:
            await self._connection.more()
        self.status, self.fields = self._connection.status, self._connection.fields

    @property
    def at_end(self) -> bool:
        """Whether all of the body was taken."""
        return self._connection.is_whole and not self._connection.parts

    def read_part(self) -> Awaitable[bytes]:
        """Return the next part of the body as soon as there is one; nothing at its end. Raises OSError if it is cut."""
        return self._connection.take()

    async def read(self) -> bytes:
        """Return the whole body. Raises OSError if it is cut."""
        parts = []
        while part := await self._connection.take():
            parts.append(part)
        return b"".join(parts)

    def release(self) -> None:
        """Keep the connection where the answer is whole, else end it. Idempotent."""
        if self._is_left:
            return
        self._is_left = True
        if self.at_end and self._connection.is_kept and self._connection.is_open:
            self._client.keep(self._connection)
        else:
            self._connection.close()

    def close(self) -> None:
        """End the connection, and so tell the replica. Idempotent."""
        if not self._is_left:
            self._is_left = True
            self._connection.close()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()  # once: to ask for it is a system call each time
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._size = 0
        self._is_paused = False
        self.is_open = True
        self.is_busy = False
        self.is_kept = False
        self.is_whole = False
        self.has_head = False
        self.parts: list[bytes] = []
        self.status = 0
        self.fields: dict[bytes, bytes] = {}
        self.idle_since_s = 0.0

    def ask(self, head: bytes, body: bytes) -> None:
        """Send it; then `more` is to come until the answer has its head."""
        self.is_busy, self.has_head, self.is_whole, self.fields = True, False, False, {}
        if len(body) < LARGE:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def take(self) -> bytes:
        """What is there of the body; nothing once it is whole and all was taken."""
        while not self.parts:
            if self.is_whole:
                return b""
            await self.more()
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts, self._size = [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """At once, whatever waits to be sent. Idempotent."""
        self.is_open = False
        self._transport.abort()

    def more(self) -> "asyncio.Future[None]":
        """Done once there is news. Raises OSError where none will come."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.is_busy or self.is_whole:  # nobody asked for it
            self._fail(ConnectionAbortedError("bytes behind an answer"))
            return
        try:
            self._parser.feed_data(data)
        except (
            httptools.HttpParserError,
            httptools.HttpParserUpgrade,
        ) as error:  # the latter: a 101, no answer of ours
            self._fail(ConnectionAbortedError(f"no answer in HTTP: {error}"))
            return
        self._wake()

    def eof_received(self) -> None:
        """The transport closes; what is not whole by now never will be."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._error = self._error or (exc if isinstance(exc, OSError) else ConnectionResetError("it has gone"))
        self._wake()

    def _fail(self, error: OSError) -> None:
        self._error, self.is_whole = error, False
        self._transport.abort()
        self._wake()

    # What the parser tells.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status, self.has_head = self._parser.get_status_code(), True
        self.is_kept = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self._size += len(body)
        if self._size > BUFFER and not self._is_paused and self.is_open:
            self._is_paused = True
            with contextlib.suppress(RuntimeError):  # it is closing
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_whole = True
