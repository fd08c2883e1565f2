"""HTTP/1.1 for a public door: bounds on the head, no pipelining, known delivery; uvicorn's server owns the listener.

Puts itself into the scope as the extension `kelvin.connection`. One request and its answer are `edge_cycle`'s.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.edge_body import BodyPace
from activator.edge_cycle import Cycle
from activator.gate import Gate
from activator.refusal import TOO_LARGE, closing
from contracts.traffic_errors import AddressBusy, DeadlineExceeded

EXTENSION: Final = "kelvin.connection"
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_MALFORMED: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)


class HttpProtocol(asyncio.Protocol):
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
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._loop = _loop or asyncio.get_running_loop()
        self._server = server_state
        self._gate = gate
        self._limits = gate.limits
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # behind the last request: ignored
        self._is_open = False
        self._cycle: Cycle | None = None
        self._taken = asyncio.Event()
        self._gone: Callable[[], None] | None = None
        self.is_full = False
        self._is_paused = False
        self._idle_s = gate.limits.idle_s
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._head_read = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._pace = BodyPace(gate.limits, self._loop, self._is_body_held, self._body_is_late)
        self._ignoring = False
        self._extensions = {EXTENSION: self}

    # What the application uses.

    def unaccepted(self) -> int:
        """Bytes of the answer that the client-side socket has not taken."""
        return self.raw.get_write_buffer_size() + self._transport.get_write_buffer_size()

    def is_accepted(self) -> bool:
        """Whether the socket has taken every byte, and the client is there."""
        return self.unaccepted() == 0 and self._is_open and not self._transport.is_closing()

    async def accepted(self) -> bool:
        """Wait until the socket has taken every byte; False where the client has gone."""
        while self._is_open and not self._transport.is_closing():
            if self.unaccepted() == 0:
                return True
            self._taken.clear()
            await self._taken.wait()
        return False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once if the client goes before the answer is complete."""
        self._gone = gone

    def has_body(self) -> bool:
        """Whether all of the request's body has come."""
        return self._cycle is not None and not self._cycle.more_body

    def body_is_read(self) -> None:
        """A large body paused the socket, and a paused socket hides a disconnect."""
        self.resume_body()

    def unwatch(self) -> None:
        """The request is over, or nobody needs to be told."""
        self._gone = None

    def abort(self) -> None:
        """End the connection now, whatever waits to be sent."""
        self.raw.abort()

    # What the cycle uses.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def end(self) -> None:
        self._transport.close()

    def pause_body(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_body(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    async def drained(self) -> None:
        await self.accepted()

    def answered(self) -> None:
        self._server.total_requests += 1
        if self._transport.is_closing():
            return
        self.resume_body()
        self._idle_since_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._judge_idle)

    def left(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._server.tasks.discard(task)

    # What the transports tell.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._own_address = transport.get_extra_info("sockname")
        self._peer = transport.get_extra_info("peername")
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._is_open = True
        self._start_head_timer()
        if self._gate.relieved:
            self._idle_s = self._limits.lame_duck_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:  # lost within the handshake
            return
        self._is_open = self.is_full = False
        self._stop_head_timer()
        self._pace.stop()
        self._stop_idle_timer()
        self._server.connections.discard(self)
        if self._cycle is not None:
            self._cycle.lost()
        self._taken.set()
        self._transport.close()
        gone, self._gone = self._gone, None
        if gone is not None and not self._is_answered():
            gone()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.raw_drained()

    def raw_drained(self) -> None:
        """The raw socket took what it had."""
        if self._is_open and self.unaccepted() == 0:
            self._taken.set()

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            return
        self._idle_since_s = None
        if self._in_head:
            self._head_read += len(data)
        else:
            self._pace.read(len(data))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to nothing that we speak: the request is served as it is
        except httptools.HttpParserError:
            self._refuse_malformed(b"Invalid HTTP request received.")
        self._judge_read()

    def _judge_read(self) -> None:
        """Of what was parsed so far: the head's bounds, and how a body comes."""
        if self._ignoring or self._transport.is_closing():
            return
        if self._in_head:
            if self._head_read > self._limits.head_bytes:
                self._refuse(TOO_LARGE, 431)
            elif self._head_read and self._head_timer is None:
                self._start_head_timer()
        elif self._pace.is_padded:
            self._refuse_malformed(b"The body is framed at too great length.")
        else:
            self._pace.watch()

    def shutdown(self) -> None:
        """The server ends. A lame duck tells its clients before it goes (RFC 9112, 9.6).

        On a connection that is cut while idle a request may be on its way. Who is within an answer is told by the next.
        """
        busy = self._busy()
        if self._gate.relieved:
            self._idle_s = self._limits.lame_duck_s
            if busy is not None:
                busy.keep_alive = busy.keep_alive and busy.response_started
            elif self._idle_since_s is not None:
                self._idle_since_s = self._loop.time()
                self._stop_idle_timer()
                self._idle_timer = self._loop.call_later(self._idle_s, self._judge_idle)
        elif busy is not None:
            busy.keep_alive = False
        else:
            self._transport.close()

    # What the parser tells.

    def on_message_begin(self) -> None:
        if (busy := self._busy()) is not None:
            # Pipelining: answer the first, then close (RFC 9112, 9.3.2). It would hide a disconnect from the first.
            self._ignoring = True
            busy.keep_alive = False
        else:
            self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        if not self._ignoring:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._ignoring:  # trailers are nobody's headers (RFC 9110, 6.5.1)
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._ignoring:
            return
        self._in_head, self._head_read = False, 0
        self._stop_head_timer()
        self._pace.begin()
        url, headers = self._url, self._headers
        if self.source is not None:
            wait_s = self._gate.addresses.asks(self.source, self._loop.time())
            if wait_s is not None:
                busy = AddressBusy(wait_s)
                self._gate.meters.refused(busy)
                self._refuse(closing(busy, url), None)
                return
        size = len(url) + sum([len(name) + len(value) + 4 for name, value in headers])
        if size > self._limits.head_bytes or len(headers) > self._limits.headers:  # a read may hold more than both
            self._refuse(TOO_LARGE, 431)
            return
        if not url.startswith(b"/") and self._names_another_host():
            self._ignoring = True
            self._refuse_malformed(b"The target names another host.")
            return
        self._begin()

    def _begin(self) -> None:
        """The head is whole and may be served."""
        parser, headers = self._parser, self._headers
        target = httptools.parse_url(self._url)
        path = target.path.decode("ascii")
        version = parser.get_http_version()
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": "https",
            "server": self._own_address,
            "client": self._peer,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query or b"",
            "headers": headers,
            "extensions": self._extensions,
        }
        expected = [value.lower() for name, value in headers if name == b"expect"]
        # The answer of a connection that may not stay says so.
        may_stay = version != "1.0" and parser.should_keep_alive() and not self._gate.relieved
        self._cycle = Cycle(self, scope, keep_alive=may_stay, invites=b"100-continue" in expected)
        self._server.tasks.add(self._loop.create_task(self._cycle.run(self._app)))

    def on_body(self, body: bytes) -> None:
        if not self._ignoring and self._cycle is not None:
            self._cycle.take(body)
            self._pace.came(len(body))

    def on_message_complete(self) -> None:
        if not self._ignoring and self._cycle is not None:
            self._in_head = True
            self._pace.stop()
            self._cycle.body_ended()

    def _busy(self) -> Cycle | None:
        """The request that waits for the end of its answer."""
        cycle = self._cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _is_answered(self) -> bool:
        return self._busy() is None

    def _refuse_malformed(self, why: bytes) -> None:
        """What the parser does not take. Behind a request that is whole it is as a second one: not answered."""
        busy = self._busy()
        if busy is not None and not busy.more_body:
            self._ignoring = True
            busy.keep_alive = False
        elif busy is not None and busy.response_started:
            self.raw.abort()
        else:
            self._refuse(_MALFORMED % (len(why), why), 400)

    def _names_another_host(self) -> bool:
        """Of a target in absolute-form, which would count instead of Host (RFC 9112, 3.2.2): the two have to agree."""
        authority = self._url.partition(b"://")[2].partition(b"/")[0]
        return [value for name, value in self._headers if name == b"host"] != [authority]

    def _refuse(self, answer: bytes, malformed: int | None) -> None:
        self._ignoring = True
        if malformed is not None:
            self._gate.meters.malformed(malformed)
        self._transport.write(answer)
        self._transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.head_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _judge_idle(self) -> None:
        """One timer goes on for as long as the connection lives: a request only notes that it came."""
        self._idle_timer = None
        if self._idle_since_s is None or self._transport.is_closing():
            return
        left_s = self._idle_since_s + self._idle_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._judge_idle)
        else:
            self._transport.close()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.raw.abort()

    def _is_body_held(self) -> bool:
        """By us: we read no more for now, or it was not invited yet."""
        return self._is_paused or (self._cycle is not None and self._cycle.invites)

    def _body_is_late(self) -> None:
        if self._transport.is_closing():
            return
        if self._cycle is not None and self._cycle.response_started:
            self.raw.abort()
        else:
            late = DeadlineExceeded(self._limits.head_s, "reading the request's body")
            self._gate.meters.refused(late)
            self._refuse(closing(late, self._url), None)
