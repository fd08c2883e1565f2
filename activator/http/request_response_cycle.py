"""One request on a connection: what comes of its body, as ASGI's `receive`, and how its answer is written, as `send`.

HTTP/1.1 (RFC 9112): head and first bytes leave together, one record, one call. What a connection may cost is the
connection's.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from activator.http.error_response import render_error
from activator.http.exchange import ARRIVED, NAMED, arrival
from kelvin.contracts.errors import Failure

log = logging.getLogger(__name__)

READ_AHEAD: Final = 64 << 10  # bytes of a body that wait here; more are left to the socket
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}
_WITHOUT_BODY: Final = (204, 304)
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nx-request-id: %b\r\nconnection: close\r\n\r\nInternal Server Error"
)


class ConnectionWriter(Protocol):
    """The connection, as its cycle uses it: one request's at a time."""

    @property
    def is_full(self) -> bool:
        """Whether what was written has not left."""
        ...

    def pause_body(self) -> None:
        """Read no more of the body for now."""
        ...

    def resume_body(self) -> None:
        """Go on."""
        ...

    async def wait_until_drained(self) -> None:
        """Until it is not full, or the client has gone."""
        ...

    def task_ended(self) -> None:
        """Called by the task that served the request, as the last that it does."""
        ...

    def write(self, data: bytes) -> None:
        """Now, or as soon as the socket takes it."""
        ...

    def end(self) -> None:
        """Close, once what was written is sent."""
        ...

    def abort(self) -> None:
        """End now, whatever waits to be sent."""
        ...

    def response_completed(self) -> None:
        """The answer is complete."""
        ...


class RequestResponseCycle:
    """Used by the one task that serves the request, and told by the connection what came of its body.

    The body of an answer has the length that was promised, or is chunked; in HTTP/1.0 it ends with its connection
    instead.
    """

    __slots__ = (
        "_bodiless", "_chunked", "_head", "_is_end_news", "_is_unframed", "_parts", "_size", "_unsent", "_waiter",
        "_writer", "disconnected", "expects_continue", "keep_alive", "more_body", "response_complete",
        "response_started", "scope",
    )  # fmt: skip

    def __init__(self, writer: ConnectionWriter, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        """`expects_continue`: the client waits to be asked for the body (RFC 9110, 10.1.1)."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self._writer = writer
        self._parts: list[bytes] = []
        self._size = 0  # of these
        self._is_end_news = False  # that it was all is to be told yet
        self._waiter: asyncio.Future[None] | None = None
        self._head: bytes | None = None  # until there is something to send with it
        self._chunked = False
        self._unsent = 0  # of the length that was promised
        self._bodiless = False
        self._is_unframed = False

    async def run(self, app: ASGIApp) -> None:
        """Serve it. A failure of the application is a 500, or a cut where the answer has begun."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("the application failed", exc_info=error)
        if not self.response_complete and not self.disconnected:
            self._fail()
        self._writer.task_ended()

    def refuse(self, failure: Failure) -> None:
        """In the place of `run`: answered here, and the connection ends with it."""
        request_id: str = self.scope[NAMED]
        status, kind, body, more = render_error(failure, self.scope["raw_path"], request_id)
        named, length = (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body))
        self._begin(status, [named, (b"content-type", kind), length, *more, (b"connection", b"close")])
        self.response_started, self.expects_continue = True, False
        self._send_body(body, more_body=False)

    # What the connection tells.

    def add_body(self, body: bytes) -> None:
        """Bytes of the body."""
        if self.response_complete:
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > READ_AHEAD:
            self._writer.pause_body()
        if self._waiter is not None:
            self._wake()

    def body_ended(self) -> None:
        """All of it has come."""
        self.more_body, self._is_end_news = False, True
        if self._waiter is not None:
            self._wake()

    def mark_disconnected(self) -> None:
        """The client has gone."""
        self.disconnected = not self.response_complete
        if self._waiter is not None:
            self._wake()

    # What the application uses.

    def try_body(self) -> bytes | None:
        """What has come of the body since the last time, where that is the rest of it, and no word is owed before."""
        if (
            self.more_body
            or not self._is_end_news
            or self.expects_continue
            or self.disconnected
            or self.response_complete
        ):
            return None
        return self._take_body()

    async def receive(self) -> Message:
        """What has come of the body since the last time, as soon as there is something to tell."""
        if self.expects_continue:
            self.expects_continue = False
            self._writer.write(_CONTINUE)
        while not (self._parts or self._is_end_news or self.disconnected or self.response_complete):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """The head, then the body in pieces. Says nothing of a client that has gone."""
        if self._writer.is_full and not self.disconnected:
            await self._writer.wait_until_drained()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.response_started
            self._begin(message["status"], message["headers"])
            self.response_started, self.expects_continue = True, False
        else:
            assert self.response_started
            assert not self.response_complete
            self._send_body(message["body"], message["more_body"])

    def _fail(self) -> None:
        """The application ended before its answer: a 500, or a cut where some of it was sent."""
        if not self.response_started or self._head is not None:  # nothing was sent
            self.response_started = True
            self._writer.write(_FAILED % self.scope[NAMED].encode())
        elif self._is_unframed:
            self._writer.abort()  # an end in good order would be that of the body
            return
        self._writer.end()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The head is known. Raises ValueError of one that can't be sent."""
        named = dict(headers)  # of each name the last value
        length, says_closing = named.get(b"content-length"), named.get(b"connection") == b"close"
        self._bodiless = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        self._chunked = b"transfer-encoding" in named
        if length is not None:
            self._unsent = int(length)
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        if says_closing:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        if length is None and not self._chunked and not self._bodiless:
            self._is_unframed = self.scope["http_version"] < "1.1"  # which knows no chunks (RFC 9112, 6.1)
            self._chunked = not self._is_unframed
            if self._chunked:
                lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") >= len(lines) or head.count(b"\r") >= len(lines):
            raise ValueError("a header holds the end of a line")
        self._head = head + b"\r\n\r\n"

    def _send_body(self, body: bytes, more_body: bool) -> None:
        """A piece of the body. Raises ValueError where it is not as long as was promised."""
        head, self._head = self._head or b"", None
        if self._bodiless:
            data = head
        elif self._chunked:
            data = head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
            if not more_body:
                data += b"0\r\n\r\n"
        elif self._is_unframed:
            data = head + body
        else:
            self._unsent -= len(body)
            if self._unsent < 0 or (self._unsent and not more_body):
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
            self._writer.response_completed()

    def _take_body(self) -> bytes:
        """What has come, which is taken with that."""
        parts, self._parts, self._size = self._parts, [], 0
        self._is_end_news = False
        self._writer.resume_body()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result(None)


def scope_of(
    version: str,
    method: str,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    server: Any,
    client: Any,
    extensions: dict[str, Any],
    request_id: str,
) -> Scope:
    """ASGI's scope, that it came just now, and how it is named. `target` is in ASCII and was parsed once. Raises
    httptools' error of one that is no target.
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
        ARRIVED: arrival(),
        NAMED: request_id,
    }
