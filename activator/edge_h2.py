"""HTTP/2 for a public door, by `h2`: what one connection may cost, who is served on it, and how it ends.

One scope and one connection object per stream (`edge_h2_stream`), so that nothing behind knows of it. Every frame is
counted before it is parsed (`edge_frames`, `policy/h2_bounds`): what is too much ends the connection. What is sent in
which order is `edge_h2_out`'s, what comes too slowly `edge_h2_late`'s.
"""

import asyncio
import math
from typing import Final

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame, SettingsFrame
from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.edge_connection import EXTENSION, EdgeConnection
from activator.edge_cycle import READ_AHEAD
from activator.edge_frames import MAX_FRAME_BYTES, PREFACE, Frame, FrameReader, NotHttp2, TooLong
from activator.edge_h2_late import FrameWatch
from activator.edge_h2_out import Outgoing
from activator.edge_h2_stream import Headers, Stream, StreamCycle
from activator.edge_head import is_too_large, scope_of
from activator.exchange import UNFRAMED
from activator.gate import Gate
from activator.policy.h2_bounds import FrameBounds, Http2Limits, Kind
from activator.policy.h2_head import read_head
from activator.refusal import rendered
from contracts.errors import Failure
from contracts.traffic_errors import DeadlineExceeded

_WINDOW: Final = 1 << 20  # bytes of bodies on their way to us, of all streams; what waits here is bounded by each one's
_TABLE_BYTES: Final = 4096  # of header compression, either way: the default, and never more, whatever a peer offers
_BACKLOG: Final = 256 << 10  # bytes in front of a socket that takes nothing: only answers to frames can come to that
_ALL: Final = (1 << 31) - 1  # as the last stream that is served
_CONFIG: Final = H2Configuration(  # what we say is right by itself; what comes in is not
    client_side=False, header_encoding=None, normalize_outbound_headers=False, validate_outbound_headers=False
)


class Http2Protocol(EdgeConnection):
    """One connection, from the end of its TLS handshake on."""

    def __init__(
        self,
        gate: Gate,
        config: Config,
        server_state: ServerState,
        limits: Http2Limits,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(gate, config, server_state, loop or asyncio.get_running_loop())
        self._http2 = limits
        self._bounds = FrameBounds(limits)
        self._reader = FrameReader()
        self._h2 = H2Connection(_CONFIG)
        # Twice what we tell: a peer that has not heard of it yet is refused a stream, not its connection.
        self._h2.local_settings = Settings(client=False, initial_values=self._settings(2))
        self._h2.decoder.max_header_list_size = limits.block_bytes
        self._streams: dict[int, Stream] = {}  # that are served, or have something to send
        self._out = Outgoing(self._h2, self._bounds, limits, self, self._loop)
        self._untaken = 0  # bytes of bodies that no room was made for yet
        self._watch = FrameWatch(self._reader, self._bounds, self._streams, self._limits.head_s, self._loop, self._end)
        self._leaving = False  # no further stream may begin
        self._leaves_at_s = math.inf
        self._has_ended = False  # nothing more is read

    def __repr__(self) -> str:
        return f"<Http2Protocol streams={len(self._streams)} {self._out} leaving={self._leaving}>"

    def _settings(self, times: int) -> dict[SettingCodes, int]:
        return {
            SettingCodes.MAX_CONCURRENT_STREAMS: times * self._http2.streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: self._limits.head_bytes,
            SettingCodes.INITIAL_WINDOW_SIZE: READ_AHEAD,
            SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
            SettingCodes.HEADER_TABLE_SIZE: _TABLE_BYTES,
        }

    # What the transports tell.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._h2.initiate_connection()
        self._h2.receive_data(PREFACE)  # which our reader keeps
        self._h2.clear_outbound_data_buffer()
        told = {int(code): value for code, value in self._settings(1).items()}
        self._out.write(SettingsFrame(0, settings=told).serialize())
        self._h2.increment_flow_control_window(_WINDOW)
        self._out.flush()
        self._watch.look()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:  # lost within the handshake
            return
        super().connection_lost(exc)
        self._end_all()

    def raw_drained(self) -> None:
        if self._is_open and self.unaccepted() == 0:
            for stream in list(self._streams.values()):
                stream.taken()
            self._out.send()

    def data_received(self, data: bytes) -> None:
        now_s, moved = self._loop.time(), False
        try:
            for frame in self._reader.feed(data):
                if self._has_ended:
                    return
                moved = True
                self._frame(frame, now_s)
        except NotHttp2:
            self._end(ErrorCodes.PROTOCOL_ERROR)
        except TooLong:
            self._end(ErrorCodes.FRAME_SIZE_ERROR)
        except ProtocolError as error:
            self._end(ErrorCodes(error.error_code))
        if not self._has_ended:
            self._out.flush()
            self._out.send()
            self._watch.count_part()
            self._watch.look(moved=moved)
            if self.unaccepted() > _BACKLOG:
                self.raw.abort()

    def shutdown(self) -> None:
        """The server ends. A lame duck serves for a while what was on its way.

        GOAWAY waits for the last stream: clients over `h2`, as httpx, drop with it all streams that they have.
        """
        if self._gate.relieved:
            self._leaves_at_s = self._loop.time() + self._limits.lame_duck_s
            self._lame_duck()
            if not self._streams and not self._has_ended:
                self._say_goodbye(_ALL)
        else:
            self.leave()

    # Frames.

    def _frame(self, frame: Frame, now_s: float) -> None:
        if self._bounds.too_much(frame.kind, frame.flags, frame.stream, frame.length, now_s) is not None:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        if frame.kind == Kind.GOAWAY:
            self._leaving = True  # it begins no stream any more, and may wait for the end of those that it has
            self._close_if_left()
            return
        if frame.kind == Kind.DATA and (stream := self._streams.get(frame.stream)) is not None:
            stream.pace.read(len(frame.raw))
        for event in self._h2.receive_data(frame.raw):
            if self._has_ended:
                return
            self._event(event, now_s)

    def _event(self, event: events.Event, now_s: float) -> None:
        match event:
            case events.DataReceived():
                self._data(event)
            case events.RequestReceived():
                self._request(event, now_s)
            case events.StreamEnded():
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    stream.pace.stop()
                    if stream.cycle is not None:
                        stream.cycle.body_ended()
            case events.StreamReset():
                self._lost(event.stream_id)
                # By `h2`, for a frame that may not come on it: to make us do it costs as much as to do it.
                if not event.remote_reset and not self._bounds.try_reset(now_s):
                    self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            case events.WindowUpdated():
                self._out.allow(event.stream_id or 0)
            case events.RemoteSettingsChanged():
                if self._h2.encoder.header_table_size > _TABLE_BYTES:
                    self._h2.encoder.header_table_size = _TABLE_BYTES
                self._out.allow(0)
            case _:
                pass

    def _data(self, event: events.DataReceived) -> None:
        flow_bytes = event.flow_controlled_length or 0
        self._untaken += flow_bytes
        if self._untaken >= _WINDOW // 2:  # whatever becomes of it: no stream waits for another one's body
            self._h2.increment_flow_control_window(self._untaken)
            self._untaken = 0
        stream = self._streams.get(event.stream_id or 0)
        if stream is None or stream.is_lost:
            return
        data = event.data or b""
        stream.pace.came(len(data) - min(stream.counted, len(data)))
        stream.counted = 0
        stream.came(data, flow_bytes)
        if stream.pace.is_padded:
            self._refuse_malformed(stream, b"The body is framed at too great length.")

    # Requests.

    def _request(self, event: events.RequestReceived, now_s: float) -> None:
        number = event.stream_id or 0
        self._idle_since_s = None
        self._watch.has_asked = True
        if self._leaving or now_s >= self._leaves_at_s or len(self._streams) >= self._http2.streams:
            self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            if not self._bounds.try_reset(now_s):
                self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        stream = self._streams[number] = Stream(number, self, self._limits, self._loop)
        head = read_head(event.headers or [])
        target = b"" if isinstance(head, str) else head.target
        if self.source is not None and (busy := self._gate.asks(self.source, now_s)) is not None:
            self.leave()
            self._refuse(stream, busy, target)
        elif isinstance(head, str):
            self._refuse_malformed(stream, head.encode())
        elif is_too_large(target, head.headers, self._limits):
            self._gate.meters.malformed(431)
            self._answer(stream, 431, [], b"")
        else:
            self._begin(stream, head.method.decode(), target, head.headers, has_body=event.stream_ended is None)

    def _begin(self, stream: Stream, method: str, target: bytes, headers: Headers, *, has_body: bool) -> None:
        extensions = {EXTENSION: stream, UNFRAMED: has_body}
        own = self._own_address
        scope = scope_of("2", method, target, headers, own, self._peer, extensions, stream.request_id)
        invites = has_body and any(value.lower() == b"100-continue" for name, value in headers if name == b"expect")
        stream.cycle = StreamCycle(stream, scope, invites=invites)
        if has_body:
            stream.pace.watch()
        else:
            stream.cycle.body_ended()
        self._serve(stream.cycle)

    def _refuse(self, stream: Stream, failure: Failure, target: bytes) -> None:
        status, kind, body, headers = rendered(failure, target, stream.request_id)
        self._answer(stream, status, [(b"content-type", kind), *headers], body)

    def _refuse_malformed(self, stream: Stream, why: bytes) -> None:
        self._gate.meters.malformed(400)
        self._answer(stream, 400, [(b"content-type", b"text/plain; charset=utf-8")], why)

    def _answer(self, stream: Stream, status: int, headers: Headers, body: bytes) -> None:
        """From the edge itself, whoever serves the request; cut where its answer has begun, or there is no room."""
        if stream.cycle is None or not stream.cycle.response_started:
            head = [(b":status", b"%d" % status), (b"x-request-id", stream.request_id.encode())]
            stream.say([*head, (b"content-length", b"%d" % len(body)), *headers], body, ends=True)
        if stream.cycle is None:
            self.ended(stream)
        elif stream.is_said:
            stream.lose()
        else:
            self.cut(stream)

    # What streams use.

    def say(self, stream: Stream, headers: Headers, *, ends: bool) -> None:
        self._h2.send_headers(stream.number, headers, end_stream=ends)
        if ends:
            self.said(stream)

    def offer(self, stream: Stream) -> None:
        self._out.offer(stream)

    def cut(self, stream: Stream) -> None:
        if not stream.is_said:  # nor lost: of a connection that has ended all are
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            stream.is_said = True
            stream.pending.clear()
            self._out.forget(stream)
            self._out.flush()
        self._loop.call_soon(stream.lose)  # its task is told, and not while it runs
        self._done(stream)

    def make_room(self, stream: Stream, nbytes: int) -> None:
        if not self._has_ended and self._is_open:
            self._h2.increment_flow_control_window(nbytes, stream.number)
            self._out.flush()

    def has_taken(self, mark: int) -> bool:
        return self._is_open and not self._transport.is_closing() and self._out.written - self.unaccepted() >= mark

    def body_is_late(self, stream: Stream) -> None:
        late = DeadlineExceeded(self._limits.head_s, "reading the request's body")
        self._gate.meters.refused(late)
        self._refuse(stream, late, b"" if stream.cycle is None else stream.cycle.scope["raw_path"])
        self._watch.look()

    def leave(self) -> None:
        self._leaving = True
        self._close_if_left()

    def ended(self, stream: Stream) -> None:
        stream.is_served = False
        self._done(stream)

    def said(self, stream: Stream) -> None:
        """A body that nobody wants any more need not come (RFC 9113, 8.1)."""
        stream.is_said = True
        self._server.total_requests += 1
        stream.pace.stop()
        known = self._h2.streams.get(stream.number)
        if known is not None and not known.closed:
            self._h2.reset_stream(stream.number, ErrorCodes.NO_ERROR)
        self._done(stream)

    def write(self, data: bytes) -> None:
        if self._is_open:
            self._transport.write(data)

    def is_stuck(self) -> None:
        self._end(ErrorCodes.ENHANCE_YOUR_CALM)

    # How streams and the connection end.

    def _lost(self, number: int | None) -> None:
        stream = self._streams.get(number or 0)
        if stream is not None:
            self._out.forget(stream)
            stream.lose()
            self._done(stream)

    def _done(self, stream: Stream) -> None:
        """Forget it once nobody serves it and nothing of it is to be sent."""
        if stream.is_served or not stream.is_said or self._streams.pop(stream.number, None) is None:
            return
        if not self._streams and self._is_open and not self._has_ended:
            self._idle_from_now()
            self._close_if_left()
            if self._leaves_at_s < math.inf and not self._has_ended:
                self._say_goodbye(_ALL)

    def _close_if_left(self) -> None:
        if self._leaving and not self._streams and not self._has_ended:
            self._has_ended = True
            self._watch.close()
            self._say_goodbye(self._h2.highest_inbound_stream_id)
            self._transport.close()

    def _say_goodbye(self, last: int, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """GOAWAY, past `h2`, which could send nothing more of the streams that it still has."""
        self._out.flush()
        if not self._transport.is_closing():
            self._out.write(GoAwayFrame(0, last_stream_id=last, error_code=code).serialize())

    def _end(self, code: ErrorCodes) -> None:
        """The whole connection, for what its peer did."""
        if self._has_ended:
            return
        self._has_ended = True
        if code != ErrorCodes.NO_ERROR:
            self._gate.meters.ended_http2(code.name.lower())
        self._h2.clear_outbound_data_buffer()
        self._say_goodbye(self._h2.highest_inbound_stream_id, code)
        self._end_all()
        self._transport.close()

    def _end_all(self) -> None:
        self._has_ended = True
        self._out.close()
        self._watch.close()
        for stream in list(self._streams.values()):
            stream.lose()
            self._done(stream)

    def _idled(self) -> None:
        self.leave()
