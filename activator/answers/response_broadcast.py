"""Stream one response to up to MAX_LISTENERS clients, each from its first byte and at its own speed.

For the run, the broadcast stands in for the client connection. Bytes count as delivered once the fastest listener has
taken them. When the last listener leaves, the client has gone. Not thread-safe: use from one event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from starlette.types import Message

from activator.answers.idempotency_secret import StoredResponse
from activator.http.deadline_timer import DeadlineTimer
from activator.http.exchange import ClientGone, Exchange, Headers

PIECE_BYTES: Final = 64 << 10  # bytes handed to a listener at once
MAX_LISTENERS: Final = 16  # of one response: each token is written once per listener, on one event loop
RATE_LIMIT_PREFIX: Final = b"x-ratelimit-"  # each listener gets its own values


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers, without headers that belong to one connection or one listener."""

    status: int
    headers: Headers


@dataclass(slots=True)
class ByteBudget:
    """Bytes that all broadcasts together may keep for late listeners."""

    limit_bytes: int
    used_bytes: int = 0


class ResponseBroadcast:
    """The response of one run. Above `keep_bytes`, or while the budget is used up, bytes that all listeners have taken
    are dropped. After that no listener can join.
    """

    def __init__(
        self,
        keep_bytes: int,
        byte_budget: ByteBudget,
        *,
        on_complete: Callable[[], Awaitable[None]],
        on_abandoned: Callable[[], None],
    ) -> None:
        """`on_complete` runs when the response is complete, before any listener gets its last bytes. `on_abandoned`
        runs when the last listener leaves before that, if the run watches for it (`watch`). Each runs at most once.
        """
        self._keep_bytes = keep_bytes
        self._byte_budget = byte_budget
        self._is_counted = True
        self._on_complete = on_complete
        self._on_abandoned = on_abandoned
        self._bytes = bytearray()
        self._trimmed_bytes = 0  # dropped bytes before `_bytes`
        self._last = b""  # last piece, held back until `on_complete` has run
        self._listeners: set[Listener] = set()
        self._on_disconnect: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self.deadline_timer = DeadlineTimer()
        self.head: ResponseHead | None = None
        self.is_complete = False
        self.has_ended = False
        self.is_aborted = False

    def __repr__(self) -> str:
        return f"<ResponseBroadcast bytes={self.size} listeners={len(self._listeners)} ended={self.has_ended}>"

    @property
    def size(self) -> int:
        """Bytes of the body so far."""
        return self._trimmed_bytes + len(self._bytes)

    @property
    def is_whole(self) -> bool:
        """Whether no bytes were dropped from the beginning."""
        return self._trimmed_bytes == 0

    @property
    def can_be_joined(self) -> bool:
        """Whether one more listener may join."""
        return self.is_whole and len(self._listeners) < MAX_LISTENERS

    def complete_body(self) -> bytes:
        """Return the body. The response must be complete and whole."""
        assert self.is_complete
        assert self.is_whole
        return bytes(self._bytes) + self._last

    @contextmanager
    def listening(self) -> "Iterator[Listener]":
        """Listen from the first byte. Leaving the block removes the listener."""
        assert self.can_be_joined
        listener = Listener(self)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            self.trim()
            if not self.has_ended and not self.is_aborted:
                self._abandon()

    async def send(self, message: Message) -> None:
        """Add a part of the response: ASGI's `send`."""
        if message["type"] == "http.response.start":
            shared_headers = [line for line in message["headers"] if not line[0].startswith(RATE_LIMIT_PREFIX)]
            self.head = ResponseHead(message["status"], shared_headers)
        elif not self.is_complete:
            data = message.get("body", b"")
            is_last = not message.get("more_body", False)
            if is_last:
                await self._end(data)
            else:
                self._add(data)
        self._wake()

    async def _end(self, data: bytes) -> None:
        self.is_complete = True
        self._on_disconnect = None
        self._last = data
        try:
            await self._on_complete()
        finally:
            self._add(data)
            self._last = b""
            self.has_ended = True
            self._wake()

    def _add(self, data: bytes) -> None:
        self._bytes += data
        if self._is_counted:
            self._byte_budget.used_bytes += len(data)

    def piece(self, begin: int) -> bytes:
        """Return the next bytes after `begin`, at most PIECE_BYTES."""
        start = begin - self._trimmed_bytes
        return bytes(self._bytes[start : start + PIECE_BYTES])

    def trim(self) -> None:
        """Drop bytes that all listeners have taken, if memory is short. Call it when a listener took bytes or left."""
        is_full = self._is_counted and self._byte_budget.used_bytes > self._byte_budget.limit_bytes
        if (is_full or not self.is_whole or len(self._bytes) > self._keep_bytes) and not self.has_ended:
            size_before = len(self._bytes)
            first_needed = min((listener.taken_bytes for listener in self._listeners), default=self.size)
            del self._bytes[: first_needed - self._trimmed_bytes]
            self._trimmed_bytes = max(self._trimmed_bytes, first_needed)
            if self._is_counted:
                self._byte_budget.used_bytes -= size_before - len(self._bytes)
        self._wake()

    def close(self) -> None:
        """End the broadcast after its run. Present listeners get the remaining bytes. Idempotent.

        The owner must have removed the run, so that no listener joins any more.
        """
        if self._is_counted:
            self._is_counted = False
            self._byte_budget.used_bytes -= len(self._bytes)
        self.abort()

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until `is_met` returns true. Raises ClientGone if the response broke off."""
        while not is_met():
            if self.is_aborted:
                raise ClientGone
            await self._changed.wait()

    # Implements `exchange.Connection`.

    def unaccepted_bytes(self) -> int:
        """Return the bytes that the fastest listener has not taken."""
        return self.size - max((listener.taken_bytes for listener in self._listeners), default=0)

    def is_all_accepted(self) -> bool:
        """Return whether one listener has taken everything."""
        return bool(self._listeners) and self.unaccepted_bytes() == 0

    async def wait_all_accepted(self) -> bool:
        """Wait until one listener has taken everything. Return False if all have left."""
        while self._listeners and not self.is_aborted:
            if self.unaccepted_bytes() == 0:
                return True
            await self._changed.wait()
        return False

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` once if the last listener leaves before the end."""
        self._on_disconnect = on_disconnect
        if not self._listeners:  # all left before the run began
            asyncio.get_running_loop().call_soon(self._abandon)  # unless one joins until then

    def try_read_body(self) -> bytes | None:
        """Return None: the request's body was read before the broadcast existed."""
        return None

    def on_body_read(self) -> None:
        """Do nothing: the request's body was read before the broadcast existed."""

    def unwatch(self, on_disconnect: Callable[[], None] | None = None) -> None:
        """Stop watching. With `on_disconnect`, do nothing if another callback has replaced it."""
        if on_disconnect is None or on_disconnect == self._on_disconnect:
            self._on_disconnect = None

    def abort(self) -> None:
        """Break off the response for all listeners."""
        if not self.has_ended:
            self.is_aborted = True
        self._wake()

    def _abandon(self) -> None:
        if self._listeners:
            return
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            self._on_abandoned()
            on_disconnect()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Listener:
    """One client of a broadcast. Use from one task."""

    __slots__ = ("_broadcast", "taken_bytes")

    def __init__(self, broadcast: ResponseBroadcast) -> None:
        self._broadcast = broadcast
        self.taken_bytes = 0

    async def wait_head(self) -> ResponseHead:
        """Wait for the head of the response. Raises ClientGone if there will be none."""
        await self._broadcast.wait_for(lambda: self._broadcast.head is not None)
        assert self._broadcast.head is not None
        return self._broadcast.head

    async def next_piece(self) -> tuple[bytes, bool]:
        """Return the next bytes, and whether they are the last. `record_taken` confirms them. Raises ClientGone."""
        broadcast = self._broadcast
        await broadcast.wait_for(lambda: broadcast.size > self.taken_bytes or broadcast.has_ended)
        data = broadcast.piece(self.taken_bytes)
        return data, broadcast.has_ended and self.taken_bytes + len(data) == broadcast.size

    def record_taken(self, nbytes: int) -> None:
        """Record that the client's socket has accepted `nbytes` more."""
        self.taken_bytes += nbytes
        self._broadcast.trim()


async def play(
    exchange: Exchange,
    listener: Listener,
    extra_headers: Headers,
    before_end: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Send the broadcast to a client, no faster than it reads. Raises ClientGone, also if the run breaks off."""
    head = await listener.wait_head()
    await exchange.start(head.status, [*head.headers, *extra_headers])
    while True:
        data, is_last = await listener.next_piece()
        if is_last:
            if before_end is not None:
                await before_end(head.status)
            await exchange.finish(data)
            listener.record_taken(len(data))
            return
        await exchange.write(data)
        listener.record_taken(len(data))


async def replay(
    exchange: Exchange, content: StoredResponse, extra_headers: Headers, before_end: Callable[[int], Awaitable[None]]
) -> None:
    """Send a kept answer, no faster than the client reads it. Raises ClientGone, and what `before_end` raises."""
    body = content.body
    repeat_of = (b"x-kelvin-repeat-of", content.request_id.encode())
    await exchange.start(content.status, [*content.headers, *extra_headers, repeat_of])
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for begin in range(0, last, PIECE_BYTES):
        await exchange.write(body[begin : begin + PIECE_BYTES])
    await before_end(content.status)
    await exchange.finish(body[last:])
