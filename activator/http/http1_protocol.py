"""Serve HTTP/1.1 to the public: limits on the head, no pipelining, known delivery. uvicorn's server owns the listener.
`request_response_cycle.py` handles one request and its response, `client_connection.py` the sockets.
"""

import asyncio
import re
from itertools import chain
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.http.body_rate_monitor import BodyRateMonitor
from activator.http.client_connection import EXTENSION, ClientConnection
from activator.http.deadline_timer import DeadlineTimer
from activator.http.error_response import closing_response, head_too_large_response, malformed_response
from activator.http.exchange import REQUEST_ID_KEY, new_request_id
from activator.http.listener_state import ListenerState
from activator.http.request_response_cycle import RequestResponseCycle, build_scope
from kelvin.contracts.traffic_errors import DeadlineExceeded

MALFORMED: Final = b"Invalid HTTP request received."
# The parser also accepts other protocols, other versions or none, several spaces, and fragments in a target.
# One empty line before the request is allowed (RFC 9112, 2.2). CONNECT is refused: its target is no path.
_REQUEST_LINE: Final = re.compile(rb"(?:\r\n)?(?!CONNECT )[!-~]+ [!\"$-~]+ HTTP/1\.[01]\r\n")


class Http1Protocol(ClientConnection):
    """An HTTP/1.1 connection, after its TLS handshake."""

    def __init__(
        self,
        listener_state: ListenerState,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(listener_state, config, server_state, _loop or asyncio.get_running_loop())
        self._parser = self._new_parser()
        self._cycle: RequestResponseCycle | None = None
        self._is_paused = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._codings: list[bytes] = []  # values of Transfer-Encoding headers
        self._is_in_head = True
        self._head_bytes = 0
        self._request_line = b""  # the head read so far, until its first line is complete
        self._may_message_begin = False  # whether a message may begin in the data being read now
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_rate = BodyRateMonitor(listener_state.limits, self._loop, self._is_body_held, self._on_body_too_slow)
        self._body_bytes = 0  # of an incomplete body, in the last read
        self._is_ignoring_input = False
        self.deadline_timer = DeadlineTimer(is_persistent=True)
        self._extensions = {EXTENSION: self}

    # Called by the application.

    def try_read_body(self) -> bytes | None:
        return None if self._cycle is None else self._cycle.try_read_body()

    def on_body_read(self) -> None:
        """Resume reading: a large body paused the socket, and a paused socket hides a disconnect."""
        self.resume_body()

    def abort(self) -> None:
        """Close the connection now. Unsent data is lost."""
        self.raw.abort()

    # Called by the cycle.

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

    async def wait_until_drained(self) -> None:
        """Wait until the client has accepted the responses so far. Cut a client that accepts nothing for `stall_s`.
        Otherwise its next request would stay inside for ever.
        """
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await self.wait_all_accepted()
        except TimeoutError:
            self.abort()

    def on_response_completed(self) -> None:
        self._server.total_requests += 1
        if self._transport.is_closing():
            return
        self.resume_body()
        self._idle_from_now()

    # Called by the transports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:  # lost during the handshake
            return
        super().connection_lost(exc)
        self._stop_head_timer()
        self._body_rate.stop()
        self.deadline_timer.close()
        if self._cycle is not None:
            self._cycle.mark_disconnected()
        self._notify_disconnect(is_answered=self._is_answered())

    def data_received(self, data: bytes) -> None:
        if self._is_ignoring_input:
            return
        self._idle_since_s = None
        if self._is_in_head:
            if not self._head_bytes:
                self._may_message_begin, self._request_line = True, data
            elif b"\n" not in self._request_line[2:]:
                self._request_line += data
            self._head_bytes += len(data)
        else:
            self._body_rate.record_raw_bytes(len(data))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._is_ignoring_input:
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse_malformed(MALFORMED)
        if self._head_bytes or not self._is_in_head:  # skip the check if this read completed the request
            self._check_read()

    def _parse_without_upgrade(self, behind_head: bytes) -> None:
        """Parse the request again without its Upgrade header, which we ignore (RFC 9110, 7.8). The parser can't ignore
        it. It ends such a message after the head, and would read the body as the next request.
        """
        other_headers = [b"%b: %b\r\n" % (name, value) for name, value in self._headers if name != b"upgrade"]
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(other_headers))
        self._parser, self._may_message_begin = self._new_parser(), True
        try:
            self._parser.feed_data(head + behind_head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse_malformed(MALFORMED)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(
            lenient_data_after_close=True,  # data after the last request is ignored
            # `_is_chunked` checks these headers in a head. In a trailer the parser would refuse the body for them.
            lenient_chunked_length=True,
            lenient_transfer_encoding=True,
        )
        return parser

    def _check_read(self) -> None:
        """Check the parsed part: the size of the head, or the framing and pace of the body."""
        if self._is_ignoring_input or self._transport.is_closing():
            return
        if self._is_in_head:
            if self._running_cycle() is not None:
                self._head_bytes = 0
                return  # Only empty lines came. Anything else would be a pipelined request, which is ignored.
            if self._head_bytes > self._limits.head_bytes:
                self._refuse(head_too_large_response(self._request_id()), 431)
            elif self._head_bytes and self._head_timer is None:
                self._start_head_timer()
            return
        self._body_rate.record_body_bytes(self._body_bytes)
        self._body_bytes = 0
        if self._body_rate.is_padded:
            self._refuse_malformed(b"The body is framed at too great length.")
        else:
            self._body_rate.watch()

    def shutdown(self) -> None:
        """Close the connection because the server ends. A lame duck announces it first (RFC 9112, 9.6).

        A lame duck keeps an idle connection open for a while, since a request may be on its way. If the current
        response has begun, the next response carries the announcement.
        """
        unfinished = self._running_cycle()
        if self._listener_state.is_replaced:
            if unfinished is not None:
                unfinished.keep_alive = unfinished.keep_alive and unfinished.response_started
            self._lame_duck()
        elif unfinished is not None:
            unfinished.keep_alive = False
        else:
            self._transport.close()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if (unfinished := self._running_cycle()) is not None:
            # Pipelining: answer the first request, then close (RFC 9112, 9.3.2). Otherwise the second request would
            # hide a disconnect from the first.
            self._is_ignoring_input = True
            unfinished.keep_alive = False
        elif not self._may_message_begin:
            # Pipelined after a body whose request was already answered.
            self._is_ignoring_input = True
            self._transport.close()
        else:
            self._may_message_begin = False
            self._url, self._headers, self._codings = b"", [], []

    def on_url(self, url: bytes) -> None:
        if not self._is_ignoring_input:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head and not self._is_ignoring_input:  # trailer fields are ignored (RFC 9110, 6.5.1)
            name = name.lower()
            if name == b"transfer-encoding":
                self._codings.append(value)  # not stripped: the parser does not recognise "chunked" before a tab
            self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._is_ignoring_input:
            return
        # The head has to be unambiguous: every parser finds the same request and the same end of its body.
        if _REQUEST_LINE.match(self._request_line) is None or (self._codings and not self._is_chunked()):
            self._refuse(malformed_response(MALFORMED, self._request_id()), 400)
            return
        if self._parser.should_upgrade():  # `_parse_without_upgrade` comes next
            return
        self._is_in_head, self._head_bytes = False, 0
        if self._head_timer is not None:
            self._stop_head_timer()
        url = self._url
        if (
            self.source is not None
            and (busy := self._listener_state.check_request_rate(self.source, self._loop.time())) is not None
        ):
            self._refuse(closing_response(busy, url, self._request_id()), None)
            return
        if self._is_head_too_large():  # one read may contain more than the limit
            self._refuse(head_too_large_response(self._request_id()), 431)
            return
        if not url.startswith(b"/") and self._names_another_host():
            self._is_ignoring_input = True
            self._refuse_malformed(b"The target names another host.")
            return
        self._begin()

    def _is_head_too_large(self) -> bool:
        size = len(self._url) + 4 * len(self._headers) + sum(map(len, chain.from_iterable(self._headers)))
        return size > self._limits.head_bytes or len(self._headers) > self._limits.headers

    def _is_chunked(self) -> bool:
        """Return whether the body is chunked by one coding that every parser reads alike, without a Content-Length."""
        has_length = any(name == b"content-length" for name, _ in self._headers)
        codings = [value.rstrip(b" ").lower() for value in self._codings]
        return codings == [b"chunked"] and not has_length and self._parser.get_http_version() == "1.1"

    def _begin(self) -> None:
        """Serve the request whose head is complete."""
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        method = parser.get_method().decode("ascii")
        request_id, server = new_request_id(), self._own_address
        scope = build_scope(version, method, self._url, headers, server, self._peer, self._extensions, request_id)
        is_old = version < "1.1"  # HTTP/1.0: no keep-alive, and no `100 Continue` (RFC 9110, 10.1.1)
        expected: list[bytes] = []
        if not is_old and b"expect" in dict(headers):  # rare, and faster than a loop over all headers
            expected = [value.lower() for name, value in headers if name == b"expect"]
        # Without keep-alive, the response says `connection: close`.
        keep_alive = not is_old and parser.should_keep_alive() and not self._listener_state.is_replaced
        self._cycle = RequestResponseCycle(
            self, scope, keep_alive=keep_alive, expects_continue=b"100-continue" in expected
        )
        self._serve(self._cycle)

    def on_body(self, body: bytes) -> None:
        if not self._is_ignoring_input and self._cycle is not None:
            self._cycle.add_body(body)
            self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self._is_ignoring_input and not self._is_in_head and self._cycle is not None:
            self._is_in_head = True
            self._body_bytes = 0
            self._body_rate.stop()
            self._cycle.mark_body_complete()
            if not self._parser.should_keep_alive():  # a trailer may say so, too; the parser ignores data after it
                self._cycle.keep_alive = False
                if self._cycle.response_complete:
                    self._transport.close()

    def _running_cycle(self) -> RequestResponseCycle | None:
        """Return the request whose response is not complete yet."""
        cycle = self._cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _request_id(self) -> str:
        """Return the id of the running request, or a new id for a request that is refused here."""
        unfinished = self._running_cycle()
        request_id: str = new_request_id() if unfinished is None else unfinished.scope[REQUEST_ID_KEY]
        return request_id

    def _is_answered(self) -> bool:
        return self._running_cycle() is None

    def _refuse_malformed(self, why: bytes) -> None:
        """Refuse data that the parser rejects. After a complete request it counts as pipelined and gets no response."""
        unfinished = self._running_cycle()
        if unfinished is not None and not unfinished.more_body:
            self._is_ignoring_input = True
            unfinished.keep_alive = False
        elif unfinished is not None and unfinished.response_started:
            self.raw.abort()
        else:
            self._refuse(malformed_response(why, self._request_id()), 400)

    def _names_another_host(self) -> bool:
        """Return whether a target in absolute-form differs from Host, which it would replace (RFC 9112, 3.2.2)."""
        scheme, _, rest = self._url.partition(b"://")
        authority = rest.partition(b"/")[0]
        hosts = [value for name, value in self._headers if name == b"host"]
        return hosts != [authority] or scheme.lower() not in (b"http", b"https")

    def _refuse(self, response: bytes, malformed_status: int | None) -> None:
        self._is_ignoring_input = True
        if malformed_status is not None:
            self._listener_state.metrics.count_malformed_request(malformed_status)
        self._transport.write(response)
        self._transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.head_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_idle(self) -> None:
        self._transport.close()

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        self.raw.abort()

    def _is_body_held(self) -> bool:
        """Return whether we hold up the body: reading is paused, or `100 Continue` was not sent yet."""
        return self._is_paused or (self._cycle is not None and self._cycle.expects_continue)

    def _on_body_too_slow(self) -> None:
        if self._transport.is_closing():
            return
        if self._cycle is not None and self._cycle.response_started:
            self.raw.abort()
        else:
            failure = DeadlineExceeded(self._limits.head_s, "reading the request's body")
            self._listener_state.metrics.count_refusal(failure)
            self._refuse(closing_response(failure, self._url, self._request_id()), None)
