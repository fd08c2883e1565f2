"""One request on a connection: its body as ASGI's `receive`, and its response as ASGI's `send`.

Implements HTTP/1.1 (RFC 9112). The head and the first bytes of the body are written together: one TLS record, one
system call. The limits of a connection are in `http1_protocol.py`.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from activator.http.error_response import render_error
from activator.http.exchange import ARRIVAL_KEY, REQUEST_ID_KEY, read_clocks_us
from kelvin.contracts.errors import Failure

log = logging.getLogger(__name__)

READ_AHEAD: Final = 64 << 10  # bytes of a body buffered here; above that, reading pauses
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}
_WITHOUT_BODY: Final = (204, 304)
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nx-request-id: %b\r\nconnection: close\r\n\r\nInternal Server Error"
)


class ConnectionWriter(Protocol):
    """The connection, as seen by the request that it currently serves."""

    @property
    def is_writing_paused(self) -> bool:
        """Whether written data still waits for the socket."""
        ...

    def pause_body(self) -> None:
        """Stop reading the body for now."""
        ...

    def resume_body(self) -> None:
        """Continue to read the body."""
        ...

    async def wait_until_drained(self) -> None:
        """Wait until the connection is not full, or the client has left."""
        ...

    def on_task_ended(self) -> None:
        """Called by the task that served the request, as its last step."""
        ...

    def write(self, data: bytes) -> None:
        """Send the data now, or as soon as the socket accepts it."""
        ...

    def end(self) -> None:
        """Close after all written data is sent."""
        ...

    def abort(self) -> None:
        """Close now. Unsent data is lost."""
        ...

    def on_response_completed(self) -> None:
        """Record that the response is complete."""
        ...


class RequestResponseCycle:
    """A request and its response. One task serves it; the connection feeds its body. The response body has its
    announced length, or is chunked. In HTTP/1.0, which has no chunks, closing the connection ends it.
    """

    __slots__ = (
        "_body_bytes", "_body_parts", "_has_no_body", "_has_unread_end", "_is_chunked", "_is_unframed",
        "_response_head", "_unsent_bytes", "_waiter", "_writer", "disconnected", "expects_continue", "keep_alive",
        "more_body", "response_complete", "response_started", "scope",
    )  # fmt: skip

    def __init__(self, writer: ConnectionWriter, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        """`expects_continue`: the client waits for `100 Continue` before it sends the body (RFC 9110, 10.1.1)."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self._writer = writer
        self._body_parts: list[bytes] = []
        self._body_bytes = 0  # of `_body_parts`
        self._has_unread_end = False  # the end of the body has arrived, and `receive` has not returned it yet
        self._waiter: asyncio.Future[None] | None = None
        self._response_head: bytes | None = None  # waits for the first bytes of the body
        self._is_chunked = False
        self._unsent_bytes = 0  # bytes left of the announced Content-Length
        self._has_no_body = False
        self._is_unframed = False

    async def run(self, app: ASGIApp) -> None:
        """Run the application. Its failure becomes a 500, or closes the connection if the response has begun."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("the application failed", exc_info=error)
        if not self.response_complete and not self.disconnected:
            self._fail()
        self._writer.on_task_ended()

    def refuse(self, failure: Failure) -> None:
        """Answer with a failure instead of calling `run`. The connection closes afterwards."""
        request_id: str = self.scope[REQUEST_ID_KEY]
        status, kind, body, more = render_error(failure, self.scope["raw_path"], request_id)
        named, length = (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body))
        self._build_head(status, [named, (b"content-type", kind), length, *more, (b"connection", b"close")])
        self.response_started, self.expects_continue = True, False
        self._send_body(body, more_body=False)

    # Called by the connection.

    def add_body(self, body: bytes) -> None:
        """Add a part of the request body."""
        if self.response_complete:
            return
        self._body_parts.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > READ_AHEAD:
            self._writer.pause_body()
        if self._waiter is not None:
            self._wake()

    def mark_body_complete(self) -> None:
        """Record that the request body is complete."""
        self.more_body, self._has_unread_end = False, True
        if self._waiter is not None:
            self._wake()

    def mark_disconnected(self) -> None:
        """Record that the client has left."""
        self.disconnected = not self.response_complete
        if self._waiter is not None:
            self._wake()

    # Called by the application.

    def try_read_body(self) -> bytes | None:
        """Return the rest of the body, or None if it has not all arrived or `100 Continue` must be sent first."""
        if (
            self.more_body
            or not self._has_unread_end
            or self.expects_continue
            or self.disconnected
            or self.response_complete
        ):
            return None
        return self._take_body()

    async def receive(self) -> Message:
        """Wait for more of the body, its end, or a disconnect. Sends `100 Continue` if the client expects it."""
        if self.expects_continue:
            self.expects_continue = False
            self._writer.write(_CONTINUE)
        while not (self._body_parts or self._has_unread_end or self.disconnected or self.response_complete):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the head or a piece of the body. Does nothing if the client has left."""
        if self._writer.is_writing_paused and not self.disconnected:
            await self._writer.wait_until_drained()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.response_started
            self._build_head(message["status"], message["headers"])
            self.response_started, self.expects_continue = True, False
        else:
            assert self.response_started
            assert not self.response_complete
            self._send_body(message["body"], message["more_body"])

    def _fail(self) -> None:
        """End a response that the application left incomplete: a 500, or a cut if some of it was sent."""
        if not self.response_started or self._response_head is not None:  # nothing was sent
            self.response_started = True
            self._writer.write(_FAILED % self.scope[REQUEST_ID_KEY].encode())
        elif self._is_unframed:
            self._writer.abort()  # a clean close would look like the end of the body
            return
        self._writer.end()

    def _build_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Build the head and keep it for the first write. Raises ValueError if a header contains a line break."""
        named = dict(headers)  # last value of each name
        length, says_closing = named.get(b"content-length"), named.get(b"connection") == b"close"
        self._has_no_body = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        self._is_chunked = b"transfer-encoding" in named
        if length is not None:
            self._unsent_bytes = int(length)
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        if says_closing:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        if length is None and not self._is_chunked and not self._has_no_body:
            self._is_unframed = self.scope["http_version"] < "1.1"  # HTTP/1.0 has no chunks (RFC 9112, 6.1)
            self._is_chunked = not self._is_unframed
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") >= len(lines) or head.count(b"\r") >= len(lines):
            raise ValueError("a header holds the end of a line")
        self._response_head = head + b"\r\n\r\n"

    def _send_body(self, body: bytes, more_body: bool) -> None:
        """Write a piece of the body. Raises ValueError if the body differs from its announced length."""
        head, self._response_head = self._response_head or b"", None
        if self._has_no_body:
            data = head
        elif self._is_chunked:
            data = head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
            if not more_body:
                data += b"0\r\n\r\n"
        elif self._is_unframed:
            data = head + body
        else:
            self._unsent_bytes -= len(body)
            if self._unsent_bytes < 0 or (self._unsent_bytes and not more_body):
                raise ValueError("the body is not as long as was promised")
            data = head + body
        if data:
            self._writer.write(data)
        if not more_body:
            self.response_complete = True
            if self._waiter is not None:
                self._wake()
            if not self.keep_alive:
                self._writer.end()
            self._writer.on_response_completed()

    def _take_body(self) -> bytes:
        """Return and remove the buffered part of the body."""
        parts, self._body_parts, self._body_bytes = self._body_parts, [], 0
        self._has_unread_end = False
        self._writer.resume_body()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result(None)


def build_scope(
    version: str,
    method: str,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    server: Any,
    client: Any,
    extensions: dict[str, Any],
    request_id: str,
) -> Scope:
    """Return the ASGI scope, with the current time as arrival and the request id. `target` is ASCII and was parsed
    once. Raises httptools' parser error for an invalid target.
    """
    parsed = httptools.parse_url(target)
    path = parsed.path.decode("ascii")
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": version,
        "method": method,
        "scheme": "https",
        "server": server,
        "client": client,
        "root_path": "",
        "path": unquote(path) if "%" in path else path,
        "raw_path": parsed.path,
        "query_string": parsed.query or b"",
        "headers": headers,
        "extensions": extensions,
        ARRIVAL_KEY: read_clocks_us(),
        REQUEST_ID_KEY: request_id,
    }
