"""How an answer is written in HTTP/1.1 (RFC 9112): head and first bytes leave together, one record, one call."""

from http import HTTPStatus
from typing import Final, Protocol

from starlette.types import Scope

from activator.edge_cycle import Cycle, Wire
from activator.exchange import NAMED

_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}
_WITHOUT_BODY: Final = (204, 304)
_INVITATION: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nx-request-id: %b\r\nconnection: close\r\n\r\nInternal Server Error"
)


class HttpWire(Wire, Protocol):
    """A connection that is one request's at a time."""

    def write(self, data: bytes) -> None:
        """Now, or as soon as the socket takes it."""
        ...

    def end(self) -> None:
        """Close, once what was written is sent."""
        ...

    def abort(self) -> None:
        """End now, whatever waits to be sent."""
        ...

    def answered(self) -> None:
        """The answer is complete."""
        ...


class HttpCycle(Cycle):
    """The body has the length that was promised, or is chunked; in HTTP/1.0 it ends with its connection instead."""

    __slots__ = ("_bodiless", "_chunked", "_head", "_http", "_is_unframed", "_unsent", "keep_alive")

    def __init__(self, wire: HttpWire, scope: Scope, *, keep_alive: bool, invites: bool) -> None:
        super().__init__(wire, scope, invites=invites)
        self.keep_alive = keep_alive
        self._http = wire
        self._head: bytes | None = None  # until there is something to send with it
        self._chunked = False
        self._unsent = 0  # of the length that was promised
        self._bodiless = False
        self._is_unframed = False

    def _invite(self) -> None:
        self._http.write(_INVITATION)

    def _fail(self) -> None:
        if not self.response_started or self._head is not None:  # nothing was sent
            self.response_started = True
            self._http.write(_FAILED % self.scope[NAMED].encode())
        elif self._is_unframed:
            self._http.abort()  # an end in good order would be that of the body
            return
        self._http.end()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
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
            self._http.write(data)
        if not more_body:
            self._completed()
            if not self.keep_alive:
                self._http.end()
            self._http.answered()
