"""An HTTP/1.1 client for one replica with kept connections. It supports only what Kelvin's replicas use.

Head and body of a request are one write. A response is read no faster than its reader takes it. Every failure is an
OSError. `docs/design/0022-upstream-http.md` explains why this is not a library.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable
from typing import Final, cast

import httptools

from activator import dependencies
from kelvin.ipc.connector import Connector

BUFFER_BYTES: Final = 64 << 10
CONNECT_S: Final = dependencies.REPLICA.timeout_s
KEEP_ALIVE_S: Final = 30.0  # shorter than a replica's idle timeout
LARGE_BODY_BYTES: Final = 1 << 20  # a larger body is not copied to join its head

Fields = Iterable[tuple[str, str]]


class Client:
    """Connections to one replica: one per running request, and idle ones for the next requests."""

    def __init__(self, connector: Connector, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._connector = connector
        self._keep_alive_s = keep_alive_s
        self._idle: list[_Connection] = []  # most recently used last
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Client {self._connector} idle={len(self._idle)}>"

    async def request(self, method: str, target: str, body: bytes = b"", fields: Fields = ()) -> "UpstreamResponse":
        """Send a request and return the response after its head. Raises OSError. Cancelling closes the connection."""
        response = await self.start_request(method, target, body, fields)
        try:
            await response.wait_head()
        except BaseException:
            response.close()
            raise
        return response

    async def start_request(
        self, method: str, target: str, body: bytes = b"", fields: Fields = ()
    ) -> "UpstreamResponse":
        """Send a request and return its response at once; call `wait_head` next. Raises OSError."""
        first = f"{method} {target} HTTP/1.1\r\nhost: replica\r\ncontent-length: {len(body)}"
        head = "\r\n".join((first, *map(": ".join, fields), "\r\n")).encode()
        connection = self._try_reuse() or await self._connect()
        connection.send(head, body)
        return UpstreamResponse(self, connection)

    def close(self) -> None:
        """Close idle connections. A connection in use closes when its response is released."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def keep_connection(self, connection: "_Connection") -> None:
        """Keep the connection for a later request."""
        if self._is_closed:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def _try_reuse(self) -> "_Connection | None":
        """Return the most recently used idle connection, or None. If that one is too old, all are."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since_s < self._keep_alive_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        if self._is_closed:
            raise ConnectionAbortedError("this client is closed")
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._connector.connect(_Connection)
        except TimeoutError:
            raise ConnectionRefusedError(f"no connection within {CONNECT_S:g} s") from None


class UpstreamResponse:
    """One response. Call `wait_head` first; end with `release`, or with `close` to end the connection."""

    def __init__(self, client: Client, connection: "_Connection") -> None:
        self._client = client
        self._connection = connection
        self._is_released = False
        self.status = 0  # until the head has arrived
        self.fields: dict[bytes, bytes] = {}  # by lower-case name

    async def wait_head(self) -> None:
        """Wait for status and fields. Raises OSError. Safe to cancel and to repeat."""
        while not self._connection.has_head:
            await self._connection.wait_data()
        self.status, self.fields = self._connection.status, self._connection.fields

    @property
    def at_end(self) -> bool:
        """Whether the whole body has been taken."""
        return self._connection.is_whole and not self._connection.parts

    def read_part(self) -> Awaitable[bytes]:
        """Return the next part of the body when it arrives; b"" at its end. Raises OSError if the body is cut."""
        return self._connection.read_part()

    async def read(self) -> bytes:
        """Return the whole body. Raises OSError if it is cut."""
        parts = []
        while part := await self._connection.read_part():
            parts.append(part)
        return b"".join(parts)

    def release(self) -> None:
        """Keep the connection if the response was read to its end, else close it. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        if self.at_end and self._connection.is_kept and self._connection.is_open:
            self._client.keep_connection(self._connection)
        else:
            self._connection.close()

    def close(self) -> None:
        """Close the connection, which cancels the request at the replica. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._connection.close()


class _Connection(asyncio.Protocol):
    """A connection that serves one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()  # kept, because each look-up costs a system call
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

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request. Await `wait_data` until the head has arrived."""
        self.is_busy, self.has_head, self.is_whole, self.fields = True, False, False, {}
        if len(body) < LARGE_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def read_part(self) -> bytes:
        """Wait for and return buffered bytes of the body; b"" after its end."""
        while not self.parts:
            if self.is_whole:
                return b""
            await self.wait_data()
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts, self._size = [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Close at once. Unsent data is lost. Idempotent."""
        self.is_open = False
        self._transport.abort()

    def wait_data(self) -> "asyncio.Future[None]":
        """Return a future that is done when more has arrived. Raises OSError if no more will arrive."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.is_busy or self.is_whole:  # no request is waiting for this
            self._fail(ConnectionAbortedError("bytes behind an answer"))
            return
        try:
            self._parser.feed_data(data)
        except (
            httptools.HttpParserError,
            httptools.HttpParserUpgrade,
        ) as error:  # HttpParserUpgrade: a 101, which Kelvin's replicas never send
            self._fail(ConnectionAbortedError(f"no answer in HTTP: {error}"))
            return
        self._wake()

    def eof_received(self) -> None:
        """Let the transport close. An incomplete response stays incomplete."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._error = self._error or (exc if isinstance(exc, OSError) else ConnectionResetError("it has gone"))
        self._wake()

    def _fail(self, error: OSError) -> None:
        self._error, self.is_whole = error, False
        self._transport.abort()
        self._wake()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status, self.has_head = self._parser.get_status_code(), True
        self.is_kept = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self._size += len(body)
        if self._size > BUFFER_BYTES and not self._is_paused and self.is_open:
            self._is_paused = True
            with contextlib.suppress(RuntimeError):  # the transport is closing
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_whole = True
