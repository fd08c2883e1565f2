"""One request on a connection, and the way of its answer onto the wire: ASGI's `receive` and `send` (RFC 9112).

Head and first bytes of an answer leave together: one record, one call. What a connection may cost is `edge_http`'s.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger(__name__)

READ_AHEAD: Final = 64 << 10  # bytes of a body that wait here; more are left to the socket
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WITHOUT_BODY: Final = (204, 304)
_INVITATION: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nconnection: close\r\n\r\nInternal Server Error"
)


class Wire(Protocol):
    """The connection, as its cycle uses it. `is_full`: what was written has not left."""

    is_full: bool

    def write(self, data: bytes) -> None:
        """Now, or as soon as the socket takes it."""
        ...

    def end(self) -> None:
        """Close, once what was written is sent."""
        ...

    def pause_body(self) -> None:
        """Read no more of the body for now."""
        ...

    def resume_body(self) -> None:
        """Go on."""
        ...

    async def drained(self) -> None:
        """Until it is not full, or the client has gone."""
        ...

    def answered(self) -> None:
        """The answer is complete."""
        ...

    def left(self) -> None:
        """Called by the task that served the request, as the last that it does."""
        ...


class Cycle:
    """Used by the one task that serves the request, and told by the connection what came of its body."""

    __slots__ = (
        "_bodiless", "_chunked", "_head", "_is_end_news", "_parts", "_size", "_unsent", "_waiter", "_wire",
        "disconnected", "invites", "keep_alive", "more_body", "response_complete", "response_started", "scope",
    )  # fmt: skip

    def __init__(self, wire: Wire, scope: Scope, *, keep_alive: bool, invites: bool) -> None:
        """`invites`: the client waits to be asked for the body (RFC 9110, 10.1.1)."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.invites = invites
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self._wire = wire
        self._parts: list[bytes] = []
        self._size = 0  # of these
        self._is_end_news = False  # that it was all is to be told yet
        self._waiter: asyncio.Future[None] | None = None
        self._head: bytes | None = None  # until there is something to send with it
        self._chunked = False
        self._unsent = 0  # of the length that was promised
        self._bodiless = False

    async def run(self, app: ASGIApp) -> None:
        """Serve it. A failure of the application is a 500, or a cut where the answer has begun."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("the application failed", exc_info=error)
        if not self.response_complete and not self.disconnected:
            if not self.response_started or self._head is not None:  # nothing was sent
                self.response_started = True
                self._wire.write(_FAILED)
            self._wire.end()
        self._wire.left()

    # What the connection tells.

    def take(self, body: bytes) -> None:
        """Bytes of the body."""
        if self.response_complete:
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > READ_AHEAD:
            self._wire.pause_body()
        self._wake()

    def body_ended(self) -> None:
        """All of it has come."""
        self.more_body, self._is_end_news = False, True
        self._wake()

    def lost(self) -> None:
        """The client has gone."""
        self.disconnected = not self.response_complete
        self._wake()

    # What the application uses.

    async def receive(self) -> Message:
        """What has come of the body since the last time, as soon as there is something to tell."""
        if self.invites:
            self.invites = False
            self._wire.write(_INVITATION)
        while not (self._parts or self._is_end_news or self.disconnected or self.response_complete):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts, self._parts, self._size = self._parts, [], 0
        self._is_end_news = False
        self._wire.resume_body()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """The head, then the body in pieces. Says nothing of a client that has gone."""
        if self._wire.is_full and not self.disconnected:
            await self._wire.drained()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.response_started
            self._head = self._begin(message["status"], message["headers"])
            self.response_started, self.invites = True, False
        else:
            assert self.response_started
            assert not self.response_complete
            self._send_body(message["body"], message["more_body"])

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        has_length, says_closing = False, False
        self._bodiless = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        for name, value in headers:
            if name == b"content-length":
                has_length, self._unsent = True, int(value)
            elif name == b"transfer-encoding":
                self._chunked = True
            elif name == b"connection" and value == b"close":
                self.keep_alive, says_closing = False, True
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status, *[b"%b: %b\r\n" % header for header in headers]]
        if not self.keep_alive and not says_closing:
            lines.append(b"connection: close\r\n")
        if not has_length and not self._chunked and not self._bodiless:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header holds the end of a line")
        return head + b"\r\n"

    def _send_body(self, body: bytes, more_body: bool) -> None:
        head, self._head = self._head or b"", None
        if self._bodiless:
            data = head
        elif self._chunked:
            data = head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
            if not more_body:
                data += b"0\r\n\r\n"
        else:
            self._unsent -= len(body)
            if self._unsent < 0 or (self._unsent and not more_body):
                raise ValueError("the body is not as long as was promised")
            data = head + body
        if data:
            self._wire.write(data)
        if not more_body:
            self.response_complete = True
            self._wake()
            if not self.keep_alive:
                self._wire.end()
            self._wire.answered()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
