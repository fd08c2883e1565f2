"""uvicorn's HTTP/1.1 protocol with what a public door needs: bounds on the head, no pipelining, known delivery.

Puts itself into the scope as the extension `kelvin.connection`. It leans on uvicorn's internals, so the version is
pinned and tests/activator/test_edge.py runs before it moves.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from activator.settings import EdgeLimits

EXTENSION: Final = "kelvin.connection"
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _JoinedHead:
    """A cycle's transport that sends the head of an answer together with its first bytes: one record, one call."""

    __slots__ = ("_head", "_is_past", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._is_past = False
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """uvicorn writes the head first, whole; the application always sends a body, if an empty one, right after."""
        if self._is_past or data.startswith(b"HTTP/1.1 100 "):
            self._transport.write(data)
        elif self._head:
            self._is_past = True
            self._transport.write(self._head + data)
        else:
            self._head = data


class HttpProtocol(HttpToolsProtocol):
    """One connection, from the end of its TLS handshake on."""

    raw: asyncio.Transport  # below TLS; set by the edge

    def __init__(
        self,
        limits: EdgeLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._is_open = False
        self._taken = asyncio.Event()
        self._gone: Callable[[], None] | None = None
        self._in_head = True
        self._head_read = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._ignoring = False
        self._extensions = {EXTENSION: self}

    # What the application uses.

    def unaccepted(self) -> int:
        """Bytes of the answer that the client-side socket has not taken."""
        return self.raw.get_write_buffer_size() + self.transport.get_write_buffer_size()

    def is_accepted(self) -> bool:
        """Whether the socket has taken every byte, and the client is there."""
        return self.unaccepted() == 0 and not self.cycle.disconnected and not self.transport.is_closing()

    async def accepted(self) -> bool:
        """Wait until the socket has taken every byte; False where the client has gone."""
        while not self.cycle.disconnected and not self.transport.is_closing():
            if self.unaccepted() == 0:
                return True
            self._taken.clear()
            await self._taken.wait()
        return False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once if the client goes before the answer is complete."""
        self._gone = gone

    def body_is_read(self) -> None:
        """A large body paused the socket, and a paused socket hides a disconnect."""
        self.flow.resume_reading()

    def unwatch(self) -> None:
        """The request is over, or nobody needs to be told."""
        self._gone = None

    def abort(self) -> None:
        """End the connection now, whatever waits to be sent."""
        self.raw.abort()

    # What the transports tell.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._is_open = True
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:  # lost within the handshake
            return
        self._stop_head_timer()
        super().connection_lost(exc)
        self._taken.set()
        gone, self._gone = self._gone, None
        if gone is not None and not self._is_answered():
            gone()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.raw_drained()

    def raw_drained(self) -> None:
        """The raw socket took what it had."""
        if self._is_open and self.unaccepted() == 0:
            self._taken.set()

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            return
        if self._in_head:
            self._head_read += len(data)
            if self._head_timer is None:
                self._start_head_timer()
        super().data_received(data)
        if self._in_head and self._head_read > self._limits.head_bytes and not self.transport.is_closing():
            self._refuse_head()

    # What the parser tells.

    def on_message_begin(self) -> None:
        if not self._is_answered():
            # Pipelining: answer the first, then close (RFC 9112, 9.3.2). It would hide a disconnect from the first.
            self._ignoring = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def on_url(self, url: bytes) -> None:
        if not self._ignoring:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._ignoring:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._ignoring:
            return
        self._in_head, self._head_read = False, 0
        self._stop_head_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes:  # one read may hold more than the limit
            self._ignoring = True
            self._refuse_head()
            return
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # its head is followed by nothing
            self.cycle.transport = cast(asyncio.Transport, _JoinedHead(self.transport))

    def on_body(self, body: bytes) -> None:
        if not self._ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignoring:
            self._in_head = True
            super().on_message_complete()

    def _is_answered(self) -> bool:
        """Whether no request waits for the end of its answer."""
        cycle = cast(RequestResponseCycle | None, self.cycle)
        return cycle is None or cycle.response_complete

    def _refuse_head(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.raw.abort()
