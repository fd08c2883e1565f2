"""What an HTTP/2 connection sends: of each stream a little, in turn, as flow control and the socket let it.

A stream that is not read waits alone; one that takes nothing for too long is cut, and the connection ends where it is
stuck as a whole.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

from h2.connection import H2Connection

from activator.edge_frames import MAX_FRAME_BYTES
from activator.edge_h2_stream import Stream
from activator.policy.h2_bounds import FrameBounds, Http2Limits

_TICK_S: Final = 0.001  # a timer may be early by its clock's


class Sink(Protocol):
    """The connection, as what is sent through it sees it. `is_full`: the socket has enough for now."""

    is_full: bool

    def write(self, data: bytes) -> None:
        """Bytes for the socket; nothing once the connection has ended."""
        ...

    def said(self, stream: Stream) -> None:
        """All of its answer is sent."""
        ...

    def cut(self, stream: Stream) -> None:
        """It takes nothing of what waits for it."""
        ...

    def is_stuck(self) -> None:
        """No stream can be sent anything, for as long as may be."""
        ...


class Outgoing:
    """One connection's."""

    def __init__(
        self, h2: H2Connection, bounds: FrameBounds, limits: Http2Limits, sink: Sink, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._h2 = h2
        self._bounds = bounds
        self._stall_s = limits.stall_s
        self._sink = sink
        self._loop = loop
        self._waiting: dict[int, Stream] = {}  # that have something to send
        self._ready: dict[int, Stream] = {}  # of these, what flow control lets go: who waits longest comes first
        self._moved_s = 0.0  # when something left last, of any
        self._timer: asyncio.TimerHandle | None = None
        self.written = 0  # bytes, since the connection began

    def __repr__(self) -> str:
        return f"<Outgoing waiting={len(self._waiting)} ready={len(self._ready)}>"

    def offer(self, stream: Stream) -> None:
        """It has something to send, or its head was said."""
        if stream.has_more:
            stream.since_s = self._loop.time()
            self._waiting[stream.number] = self._ready[stream.number] = stream
            self.send()
            if stream.number in self._waiting and self._timer is None:
                self._timer = self._loop.call_later(self._stall_s, self._judge)
        self.flush()
        stream.mark = self.written

    def forget(self, stream: Stream) -> None:
        """It has nothing to send any more."""
        self._waiting.pop(stream.number, None)
        self._ready.pop(stream.number, None)

    def allow(self, number: int) -> None:
        """Flow control lets more go, of one stream or of all (0)."""
        some: Iterable[Stream] = self._waiting.values()
        if number:
            some = [self._waiting[number]] if number in self._waiting else []
        for stream in some:
            self._ready.setdefault(stream.number, stream)

    def send(self) -> None:
        """A frame of each stream that may send, in turn, until the socket has enough."""
        while self._ready and not self._sink.is_full:
            stream = self._ready.pop(next(iter(self._ready)))
            if self._send_some(stream):
                self._ready[stream.number] = stream

    def flush(self) -> None:
        """What the protocol itself has to say."""
        if data := self._h2.data_to_send():
            self.write(data)

    def write(self, data: bytes) -> None:
        """Bytes past the protocol."""
        self.written += len(data)
        self._sink.write(data)

    def close(self) -> None:
        """Nothing more is sent."""
        self._waiting.clear()
        self._ready.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_some(self, stream: Stream) -> bool:
        """False where it has no more, or flow control holds it back."""
        pending = stream.pending
        size = max(0, min(len(pending), self._h2.local_flow_control_window(stream.number), MAX_FRAME_BYTES))
        ends = stream.ends and size == len(pending)
        if not size and not ends:
            return False
        self._h2.send_data(stream.number, bytes(pending[:size]), end_stream=ends)
        del pending[:size]
        self._bounds.sent_data()
        self.flush()
        stream.mark = self.written
        stream.since_s = self._moved_s = self._loop.time()
        if pending:
            return True
        del self._waiting[stream.number]
        stream.taken()
        if ends:
            self._sink.said(stream)
        return False

    def _judge(self) -> None:
        """A time has passed in which something should have been taken."""
        self._timer = None
        due_s = self._loop.time() - self._stall_s + _TICK_S
        late = [stream for stream in self._waiting.values() if stream.since_s <= due_s]
        is_held = self._sink.is_full or self._h2.outbound_flow_control_window <= 0
        if late and is_held and self._moved_s <= due_s:
            self._sink.is_stuck()
            return
        for stream in late:
            self._sink.cut(stream)
        if self._waiting:
            oldest_s = min(stream.since_s for stream in self._waiting.values())
            self._timer = self._loop.call_later(max(_TICK_S, oldest_s - due_s + _TICK_S), self._judge)
