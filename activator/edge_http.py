"""uvicorn's HTTP/1.1 protocol with what a public door needs: bounds on the head, no pipelining, known delivery.

Puts itself into the scope as the extension `kelvin.connection`. It leans on uvicorn's internals, so the version is
pinned and tests/activator/test_edge.py runs before it moves.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from activator.gate import Gate
from activator.policy.edge_rates import is_padded, is_slow
from activator.refusal import TOO_LARGE, closing
from contracts.traffic_errors import AddressBusy, DeadlineExceeded

EXTENSION: Final = "kelvin.connection"
# What uvicorn warns of is what strangers send: counted, not written down.
_log: Final = logging.getLogger("activator.http")
_log.setLevel(logging.ERROR)


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

    raw: asyncio.Transport  # below TLS; set by the edge, as the next
    source: str | None  # whom the connection counts for; None: one of our own

    def __init__(
        self,
        gate: Gate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _log
        self._gate = gate
        self._limits = gate.limits
        self._is_open = False
        self._taken = asyncio.Event()
        self._gone: Callable[[], None] | None = None
        self._in_head = True
        self._head_read = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_read = 0  # with what frames it
        self._body_bytes = 0
        self._body_before = 0  # of these, before the window that is timed
        self._body_held = False  # we, and not the client, made the window slow
        self._body_timer: asyncio.TimerHandle | None = None
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
        if self._gate.relieved:
            self.timeout_keep_alive = self._limits.lame_duck_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:  # lost within the handshake
            return
        self._stop_head_timer()
        self._stop_body_timer()
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
        else:
            self._body_read += len(data)
        super().data_received(data)
        self._judge_read()

    def _judge_read(self) -> None:
        """Of what was parsed so far: the head's bounds, and how a body comes."""
        if self._ignoring or self.transport.is_closing():
            return
        if self._in_head:
            if self._head_read > self._limits.head_bytes:
                self._refuse(TOO_LARGE, 431)
        elif is_padded(self._body_read, self._body_bytes, self._limits.head_bytes):
            self.send_400_response("The body is framed at too great length.")
        elif self._body_timer is None:
            self._start_body_timer()

    def shutdown(self) -> None:
        """The server ends. A lame duck tells its clients before it goes (RFC 9112, 9.6).

        On a connection that is cut while idle a request may be on its way. Who is within an answer is told by the next.
        """
        if not self._gate.relieved:
            super().shutdown()
            return
        self.timeout_keep_alive = self._limits.lame_duck_s
        if not self._is_answered():
            self.cycle.keep_alive = self.cycle.keep_alive and self.cycle.response_started
        elif self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
        if not self._ignoring and self._in_head:  # trailers are nobody's headers (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._ignoring:
            return
        self._in_head, self._head_read = False, 0
        self._stop_head_timer()
        self._body_read = self._body_bytes = 0
        if self.source is not None and (wait_s := self._gate.addresses.asks(self.source, self.loop.time())) is not None:
            busy = AddressBusy(wait_s)
            self._gate.meters.refused(busy)
            self._refuse(closing(busy, self.url), None)
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes or len(self.headers) > self._limits.headers:  # a read may hold more than both
            self._refuse(TOO_LARGE, 431)
            return
        if not self.url.startswith(b"/") and self._names_another_host():
            self._ignoring = True
            self.send_400_response("The target names another host.")
            return
        super().on_headers_complete()
        if self._gate.relieved:
            self.cycle.keep_alive = False  # and the answer says so
        if self.scope["method"] != "HEAD":  # its head is followed by nothing
            self.cycle.transport = cast(asyncio.Transport, _JoinedHead(self.transport))

    def on_body(self, body: bytes) -> None:
        if not self._ignoring:
            self._body_bytes += len(body)
            super().on_body(body)
            self._body_held = self._body_held or self.flow.read_paused

    def on_message_complete(self) -> None:
        if not self._ignoring:
            self._in_head = True
            self._stop_body_timer()
            super().on_message_complete()

    def _is_answered(self) -> bool:
        """Whether no request waits for the end of its answer."""
        cycle = cast(RequestResponseCycle | None, self.cycle)
        return cycle is None or cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take. Behind a request that is whole it is as a second one: not answered."""
        if not self._is_answered() and not self.cycle.more_body:
            self._ignoring = True
            self.cycle.keep_alive = False
        elif not self._is_answered() and self.cycle.response_started:
            self.raw.abort()
        else:
            self._gate.meters.malformed(400)
            super().send_400_response(msg)

    def _names_another_host(self) -> bool:
        """Of a target in absolute-form, which would count instead of Host (RFC 9112, 3.2.2): the two have to agree."""
        authority = self.url.partition(b"://")[2].partition(b"/")[0]
        return [value for name, value in self.headers if name == b"host"] != [authority]

    def _refuse(self, answer: bytes, malformed: int | None) -> None:
        self._ignoring = True
        if malformed is not None:
            self._gate.meters.malformed(malformed)
        self.transport.write(answer)
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

    def _start_body_timer(self) -> None:
        self._body_before = self._body_bytes
        self._body_held = self.flow.read_paused or self.cycle.waiting_for_100_continue
        self._body_timer = self.loop.call_later(self._limits.head_s, self._judge_body)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _judge_body(self) -> None:
        """A window has passed."""
        self._body_timer = None
        if self.transport.is_closing():
            return
        came = self._body_bytes - self._body_before
        if self._body_held or not is_slow(came, self._limits.head_s, self._limits.body_rate):
            self._start_body_timer()
        elif self.cycle.response_started:
            self.raw.abort()
        else:
            late = DeadlineExceeded(self._limits.head_s, "reading the request's body")
            self._gate.meters.refused(late)
            self._refuse(closing(late, self.url), None)
