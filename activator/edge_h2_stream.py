"""One stream of an HTTP/2 connection: a request's connection, as the application knows it, and how its answer is said.

What it has to send waits here, one piece at the most, until flow control and the socket let it go; so a stream that is
not read holds up nobody but its own producer.
"""

import asyncio
from typing import Final, Protocol

from starlette.types import Scope

from activator.alarm import Alarm
from activator.edge_body import BodyPace
from activator.edge_client import Client
from activator.edge_cycle import READ_AHEAD, Cycle
from activator.exchange import new_request_id
from activator.settings import EdgeLimits

Headers = list[tuple[bytes, bytes]]

# RFC 9113, 8.2.2: what tells of a connection has no place in a stream.
_CONNECTION: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_WITHOUT_BODY: Final = (204, 304)
_FAILED: Final[Headers] = [(b":status", b"500"), (b"content-type", b"text/plain; charset=utf-8")]
_WINDOW: Final = READ_AHEAD // 2  # bytes that were taken before more may come: not a frame for each


class Streams(Protocol):
    """The connection, as its streams use it."""

    def say(self, stream: "Stream", headers: Headers, *, ends: bool) -> None:
        """A header list, now."""
        ...

    def offer(self, stream: "Stream") -> None:
        """Send what waits in it, as flow control and the socket allow."""
        ...

    def cut(self, stream: "Stream") -> None:
        """End it, whatever waits in it."""
        ...

    def make_room(self, stream: "Stream", nbytes: int) -> None:
        """So much of its body was taken."""
        ...

    def has_taken(self, mark: int) -> bool:
        """Whether the socket has all that was written up to there."""
        ...

    def unaccepted(self) -> int:
        """Bytes in front of the socket, of all streams."""
        ...

    def body_is_late(self, stream: "Stream") -> None:
        """Its body comes too slowly."""
        ...

    def leave(self) -> None:
        """No further stream may begin."""
        ...

    def left(self) -> None:
        """The task that served a request ends."""
        ...

    def ended(self, stream: "Stream") -> None:
        """Nobody serves it any more."""
        ...


class Stream(Client):
    """What `exchange.Connection` asks for, and the wire of its cycle."""

    def __init__(self, number: int, streams: Streams, limits: EdgeLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.request_id = new_request_id()
        self.cycle: StreamCycle | None = None  # none of a request that was refused at once
        self.pace = BodyPace(limits, loop, self._is_body_held, self._body_is_late)
        self.alarm = Alarm()
        self.pending = bytearray()  # of the answer's body, what has not left
        self.ends = False  # with these bytes
        self.is_said = False  # all of it, or it was cut
        self.is_served = True  # there is, or will be, a task, or somebody who answers
        self.is_lost = False
        self.mark = 0  # up to where of what the connection wrote it has something
        self.since_s = 0.0  # when something of it left last, or it had nothing to send
        self.counted = 0  # bytes of a frame that is not whole, which its pace knows already
        self._streams = streams
        self._untaken = 0  # bytes of the body that no room was made for
        self._taken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Stream {self.number} pending={len(self.pending)} said={self.is_said} lost={self.is_lost}>"

    @property
    def has_more(self) -> bool:
        """Whether something of it is to be sent."""
        return not self.is_said and (bool(self.pending) or self.ends)

    @property
    def is_body_awaited(self) -> bool:
        """Whether more of its body may come, and is wanted."""
        return not self.is_said and self.cycle is not None and self.cycle.more_body

    # What the application uses.

    def unaccepted(self) -> int:
        """Bytes of its answer that wait for flow control, and all that is in front of the socket."""
        return len(self.pending) + self._streams.unaccepted()

    def is_here(self) -> bool:
        return not self.is_lost

    def is_accepted(self) -> bool:
        return not self.pending and not self.is_lost and self._streams.has_taken(self.mark)

    def try_body(self) -> bytes | None:
        return None if self.cycle is None else self.cycle.try_body()

    def body_is_read(self) -> None:
        """Nothing: a reset is heard in any case."""

    def abort(self) -> None:
        """End it now, and no other stream."""
        self._streams.cut(self)

    # What its cycle uses.

    @property
    def is_full(self) -> bool:
        """Whether a piece waits already."""
        return bool(self.pending)

    async def drained(self) -> None:
        """Until it has left."""
        await self.accepted()

    def pause_body(self) -> None:
        """No room is made for more."""

    def resume_body(self) -> None:
        """What has come was taken."""
        if self._untaken >= _WINDOW and self.cycle is not None and self.cycle.more_body and not self.is_lost:
            untaken, self._untaken = self._untaken, 0
            self._streams.make_room(self, untaken)

    def left(self) -> None:
        """Its task ends."""
        self._streams.left()
        self._streams.ended(self)

    def unserved(self) -> None:
        """There will be none."""
        self._streams.ended(self)

    def say(self, head: Headers | None, body: bytes, *, ends: bool) -> None:
        """A head, where it was not said, and the next bytes."""
        if self.is_lost or self.is_said:
            return
        if head is not None:
            self._streams.say(self, head, ends=ends and not body)
        if not self.is_said:
            self.pending += body
            self.ends = ends
        self._streams.offer(self)

    def inform(self) -> None:
        """Ask for the body."""
        if not self.is_lost:
            self._streams.say(self, [(b":status", b"100")], ends=False)
            self._streams.offer(self)

    def cut(self) -> None:
        """Nobody may take what was said for a whole answer."""
        self._streams.cut(self)

    def leave(self) -> None:
        """The connection ends with this answer."""
        self._streams.leave()

    # What the connection tells.

    def came(self, body: bytes, flow_bytes: int) -> None:
        """Of its body; `flow_bytes` with the padding that counts for flow control."""
        if self.cycle is not None:
            self._untaken += flow_bytes
            self.cycle.take(body)

    def taken(self) -> None:
        """Something left for the socket, or it drained."""
        self._taken.set()

    def lose(self) -> None:
        """The client has gone, or we have ended it."""
        if self.is_lost:
            return
        self.is_lost = self.is_said = True
        self.pending.clear()
        self.pace.stop()
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if cycle is not None:
            cycle.lost()
        self.taken()
        self._went(is_answered=is_answered)

    def _is_body_held(self) -> bool:
        return self._untaken >= READ_AHEAD // 2 or (self.cycle is not None and self.cycle.invites)

    def _body_is_late(self) -> None:
        self._streams.body_is_late(self)


class StreamCycle(Cycle):
    """Its answer as a header list and data. The head leaves with the first bytes of the body."""

    __slots__ = ("_bodiless", "_head", "_stream", "_unsent")

    def __init__(self, stream: Stream, scope: Scope, *, invites: bool) -> None:
        super().__init__(stream, scope, invites=invites)
        self._stream = stream
        self._head: Headers | None = None
        self._unsent: int | None = None  # of the length that was promised
        self._bodiless = False

    def _invite(self) -> None:
        self._stream.inform()

    def _fail(self) -> None:
        if self._head is not None or not self.response_started:
            self.response_started, self._head = True, None
            named = (b"x-request-id", self._stream.request_id.encode())
            self._stream.say([*_FAILED, named], b"Internal Server Error", ends=True)
        else:
            self._stream.cut()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._bodiless = self.scope["method"] == "HEAD" or status in _WITHOUT_BODY
        head: Headers = [(b":status", b"%d" % status)]
        for name, value in headers:
            if b"\n" in value or b"\r" in value:
                raise ValueError("a header holds the end of a line")
            name = name.lower()
            if name == b"content-length":
                self._unsent = int(value)
            elif name == b"connection" and value == b"close":
                self._stream.leave()
            if name not in _CONNECTION:
                head.append((name, value))
        self._head = head

    def _send_body(self, body: bytes, more_body: bool) -> None:
        head, self._head = self._head, None
        if self._bodiless:
            body = b""
        elif self._unsent is not None:
            self._unsent -= len(body)
            if self._unsent < 0 or (self._unsent and not more_body):
                raise ValueError("the body is not as long as was promised")
        if not more_body:
            self._completed()
        self._stream.say(head, body, ends=not more_body)
