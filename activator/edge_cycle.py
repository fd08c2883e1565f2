"""One request on a connection, as ASGI's `receive` and `send`: what comes of its body, and when its answer is complete.

How an answer is written is its subclasses' (`edge_answer`). What a connection may cost is the connection's.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Scope

from activator.exchange import NAMED
from activator.refusal import rendered
from contracts.errors import Failure

log = logging.getLogger(__name__)

READ_AHEAD: Final = 64 << 10  # bytes of a body that wait here; more are left to the socket


class Wire(Protocol):
    """The connection, as its cycle uses it."""

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

    async def drained(self) -> None:
        """Until it is not full, or the client has gone."""
        ...

    def left(self) -> None:
        """Called by the task that served the request, as the last that it does."""
        ...

    def unserved(self) -> None:
        """Called instead where there will be no task."""
        ...


class Cycle(ABC):
    """Used by the one task that serves the request, and told by the connection what came of its body."""

    __slots__ = (
        "_is_end_news", "_parts", "_size", "_waiter", "_wire",
        "disconnected", "invites", "more_body", "response_complete", "response_started", "scope",
    )  # fmt: skip

    def __init__(self, wire: Wire, scope: Scope, *, invites: bool) -> None:
        """`invites`: the client waits to be asked for the body (RFC 9110, 10.1.1)."""
        self.scope = scope
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

    # How an answer is written.

    @abstractmethod
    def _invite(self) -> None:
        """Ask for the body."""

    @abstractmethod
    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The head is known. Raises ValueError of one that can't be sent."""

    @abstractmethod
    def _send_body(self, body: bytes, more_body: bool) -> None:
        """A piece of the body. Raises ValueError where it is not as long as was promised."""

    @abstractmethod
    def _fail(self) -> None:
        """The application ended before its answer: a 500, or a cut where some of it was sent."""

    async def run(self, app: ASGIApp) -> None:
        """Serve it. A failure of the application is a 500, or a cut where the answer has begun."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            log.error("the application failed", exc_info=error)
        if not self.response_complete and not self.disconnected:
            self._fail()
        self._wire.left()

    def refuse(self, failure: Failure) -> None:
        """In the place of `run`: answered here, and the connection ends with it."""
        request_id: str = self.scope[NAMED]
        status, kind, body, more = rendered(failure, self.scope["raw_path"], request_id)
        named, length = (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body))
        self._begin(status, [named, (b"content-type", kind), length, *more, (b"connection", b"close")])
        self.response_started, self.invites = True, False
        self._send_body(body, more_body=False)
        self.dismiss()

    def dismiss(self) -> None:
        """In the place of `run`: nobody serves it."""
        self._wire.unserved()

    # What the connection tells.

    def take(self, body: bytes) -> None:
        """Bytes of the body."""
        if self.response_complete:
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > READ_AHEAD:
            self._wire.pause_body()
        if self._waiter is not None:
            self._wake()

    def body_ended(self) -> None:
        """All of it has come."""
        self.more_body, self._is_end_news = False, True
        if self._waiter is not None:
            self._wake()

    def lost(self) -> None:
        """The client has gone."""
        self.disconnected = not self.response_complete
        if self._waiter is not None:
            self._wake()

    # What the application uses.

    def try_body(self) -> bytes | None:
        """What has come of the body since the last time, where that is the rest of it, and no word is owed before."""
        if self.more_body or not self._is_end_news or self.invites or self.disconnected or self.response_complete:
            return None
        return self._come()

    async def receive(self) -> Message:
        """What has come of the body since the last time, as soon as there is something to tell."""
        if self.invites:
            self.invites = False
            self._invite()
        while not (self._parts or self._is_end_news or self.disconnected or self.response_complete):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._come(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """The head, then the body in pieces. Says nothing of a client that has gone."""
        if self._wire.is_full and not self.disconnected:
            await self._wire.drained()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.response_started
            self._begin(message["status"], message["headers"])
            self.response_started, self.invites = True, False
        else:
            assert self.response_started
            assert not self.response_complete
            self._send_body(message["body"], message["more_body"])

    def _come(self) -> bytes:
        """What has come, which is taken with that."""
        parts, self._parts, self._size = self._parts, [], 0
        self._is_end_news = False
        self._wire.resume_body()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _completed(self) -> None:
        """The last piece was written."""
        self.response_complete = True
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result(None)
