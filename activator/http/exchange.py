"""One request as it arrived, and its response on the way to the client's socket. `api/` decides the content."""

import asyncio
import copy
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from activator.http.deadline_timer import DeadlineTimer
from activator.limits.concurrency_limits import SharedCapacity
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import BodyTooLarge, InvalidRequest, Refused
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.trace_context import TraceContext, parse
from kelvin.contracts.traffic_errors import DeadlineExceeded

Headers = list[tuple[bytes, bytes]]

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuv"
_PAIRS: Final = [first + second for first in _DIGITS for second in _DIGITS]  # base64.b32hexencode is a slow loop
_OF_BYTE: Final = (_DIGITS * 8).encode()  # `translate` table: a byte to a digit of five of its bits
_LAST: Final = (_DIGITS[::4] * 32).encode()  # the same for three bits
_CHANCE: Final = 15  # random digits before the last one
ARRIVAL_KEY: Final = "kelvin.arrived"  # scope key: arrival time of the complete head, by both clocks
REQUEST_ID_KEY: Final = "kelvin.request_id"  # scope key: the request id
# We read one value of each of these, as of every `x-kelvin-` header. Another reader might choose the other value.
_ONCE_ONLY: Final = frozenset((b"authorization", b"content-encoding", b"content-length", b"content-type"))
_SANE_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client disconnected, or accepted no data for too long."""


class Connection(Protocol):
    """The client's connection, as the HTTP protocol puts it into the scope."""

    deadline_timer: DeadlineTimer  # deadline of the running request

    def unaccepted_bytes(self) -> int:
        """Return the sent bytes that the socket has not accepted."""
        ...

    def is_all_accepted(self) -> bool:
        """Return whether the socket has accepted everything, and the client is still connected."""
        ...

    async def wait_all_accepted(self) -> bool:
        """Wait until the socket has accepted everything. Return False if the client left."""
        ...

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` once if the client leaves, or has left already; never before this returns."""
        ...

    def try_read_body(self) -> bytes | None:
        """Return the rest of the request's body if all of it has arrived, else None."""
        ...

    def on_body_read(self) -> None:
        """Detect a disconnect at once from now on."""
        ...

    def unwatch(self, on_disconnect: Callable[[], None] | None = None) -> None:
        """Stop watching. With `on_disconnect`, do nothing if another callback has replaced it."""
        ...

    def abort(self) -> None:
        """Close the connection now. Unsent data is lost."""
        ...


def now_us() -> int:
    """Return the monotonic time in microseconds."""
    return time.monotonic_ns() // 1000


def read_clocks_us() -> tuple[int, int]:
    """Return the current time in microseconds: monotonic, and wall clock."""
    return time.monotonic_ns() // 1000, time.time_ns() // 1000


def _draw() -> Iterator[str]:
    """Yield 16 base32 digits of 78 random bits, read 256 at a time. Not thread-safe, not safe after a fork."""
    while True:
        drawn, last = os.urandom(256 * _CHANCE).translate(_OF_BYTE).decode(), os.urandom(256).translate(_LAST).decode()
        for at, digit in enumerate(last):
            yield drawn[at * _CHANCE : (at + 1) * _CHANCE] + digit


_chances: Final = _draw()


def new_request_id() -> str:
    """Return `req_` and 26 base32hex characters (RFC 4648) that sort by time: 48 bits of ms, 78 random bits."""
    high, pairs = time.time_ns() // 1_000_000 << 2, _PAIRS
    return (
        f"req_{pairs[high >> 40]}{pairs[high >> 30 & 1023]}{pairs[high >> 20 & 1023]}{pairs[high >> 10 & 1023]}"
        f"{pairs[high & 1023]}{next(_chances)}"
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request: bytes of its body, seconds of its phases, and concurrent requests."""

    body_bytes: int
    body_bytes_in_all: int  # of all running requests together
    upload_bytes: int  # for /admin and /push, which are streamed through
    body_s: float
    deadline_s: float
    stall_s: float  # a client that accepts no data for so long is cut; above 30 s the replica cuts it first
    requests: int
    hold_s: float = 1.0  # the response head is held back so long, so that a failure can have its own status


class Exchange:
    """One request and its response, used by one task. `write` returns when the client's socket has accepted the data,
    `start` and `finish` earlier.
    """

    __slots__ = (
        "_has_more", "_has_repeated_headers", "_receive", "_send", "_stall_s", "arrived_at_us", "arrived_us",
        "base_headers", "caller_trace", "client_request_id", "closes_connection", "connection", "has_started", "header",
        "headers", "hosts", "method", "path", "peer", "query", "rate_headers", "request_id",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, connection: Connection, stall_s: float) -> None:
        self.arrived_us, self.arrived_at_us = scope[ARRIVAL_KEY]  # monotonic, wall clock
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self.connection = connection
        self.method: str = scope["method"]
        self.path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = scope["headers"]
        first = dict(reversed(self.headers))
        self.header: Callable[[bytes], bytes | None] = first.get  # the first value of a header, by its lower-case name
        self._has_repeated_headers = len(first) != len(self.headers)
        self._has_more = b"transfer-encoding" in first or first.get(b"content-length", b"0") != b"0"
        host = first.get(b"host")
        self.hosts = [] if host is None else [host]
        if self._has_repeated_headers:  # otherwise skip the loop over all headers
            self.hosts = [value for name, value in self.headers if name == b"host"]
        self.request_id: str = scope[REQUEST_ID_KEY]
        self.base_headers: Headers = [(b"x-request-id", self.request_id.encode())]  # in every response
        self.rate_headers: Headers = []  # the tenant's limits per minute, and what `tap_response` adds
        client_id = first.get(b"x-request-id")
        self.client_request_id = client_id if client_id is not None and _SANE_ID.fullmatch(client_id) else None
        if self.client_request_id is not None:
            self.base_headers.append((b"x-client-request-id", self.client_request_id))
        self.has_started = False
        self.caller_trace: TraceContext | None = None
        if b"traceparent" in first:
            values = [value for name, value in self.headers if name == b"traceparent"]
            self.caller_trace = parse(values[0]) if len(values) == 1 else None  # several count as none
        self.peer: str = (scope.get("client") or ("",))[0]  # the socket's address; forwarding headers are ignored
        self.closes_connection = False  # whether the connection closes after this response

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.method} {self.path[:60]!r}>"

    def with_destination(self, send: Send, connection: Connection) -> "Exchange":
        """Return the same request with another destination for its response. Its body must have been read. The
        destination adds the headers that belong to one caller.
        """
        redirected = copy.copy(self)
        redirected._send, redirected.connection = send, connection
        redirected.base_headers, redirected.rate_headers, redirected.closes_connection = [], [], False
        return redirected

    def check_headers(self) -> None:
        """Refuse headers that can be read in two ways, and close the connection. Raises Refused(InvalidRequest)."""
        failure = None
        coding = self.header(b"content-encoding")
        if coding is not None and coding.lower() != b"identity":
            failure = InvalidRequest("content-encoding", repr(coding[:20]), "send the body without a content coding")
        elif self._has_repeated_headers:
            for name, count in Counter(name for name, _ in self.headers).items():
                if count > 1 and (name in _ONCE_ONLY or name.startswith(b"x-kelvin-")):
                    failure = InvalidRequest(name[:80].decode("latin-1"), f"({count} headers)", "send exactly one")
        if failure is not None:
            self.closes_connection = True
            raise Refused(failure)

    def deadline(self, limit_s: float) -> Deadline:
        """Return the earlier of the client's deadline (`x-kelvin-deadline-ms`) and `limit_s` after the request arrived.
        Raises Refused(InvalidRequest).
        """
        raw = self.header(b"x-kelvin-deadline-ms")
        if raw is not None:
            if (milliseconds := parse_whole_number(raw, 12)) is None:
                raise Refused(InvalidRequest("x-kelvin-deadline-ms", repr(raw[:20]), "must be whole milliseconds"))
            limit_s = min(limit_s, milliseconds / 1000)
        return Deadline.after(limit_s, self.arrived_us / 1e6)

    def tap_response(self, on_message: Callable[[Message], None], headers: Headers) -> None:
        """Call `on_message` with each message before it is sent, and add `headers` to the response."""
        send = self._send
        self.rate_headers = [*(line for line in self.rate_headers if line not in headers), *headers]

        async def send_tapped(message: Message) -> None:
            on_message(message)
            await send(message)

        self._send = send_tapped

    async def read_body(self, limit_bytes: int, within_s: float, unread_bodies: SharedCapacity, tenant: str) -> bytes:
        """Return the whole body. If it has not arrived yet, hold one of the tenant's places in `unread_bodies`
        meanwhile. Raises Refused(BodyTooLarge | DeadlineExceeded | Overloaded), ClientGone.
        """
        body = self.connection.try_read_body() if self._has_more else b""
        if body is None:
            self.check_length(limit_bytes)
            with unread_bodies.hold(tenant, 1):
                try:
                    async with asyncio.timeout(within_s):
                        return await self._read_parts(limit_bytes)
                except TimeoutError:
                    raise Refused(DeadlineExceeded(within_s, "reading the request's body")) from None
        self._has_more = False
        if len(body) > limit_bytes:
            raise Refused(BodyTooLarge(limit_bytes))
        return body

    async def _read_parts(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while self._has_more:
            part = self._read_part(await self._receive())
            size += len(part)
            if size > limit_bytes:
                raise Refused(BodyTooLarge(limit_bytes))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def receive(self) -> bytes:
        """Return the next part of the body. It was the last one if `has_more` is false now. Raises ClientGone."""
        return self._read_part(await self._receive())

    def _read_part(self, message: Message) -> bytes:
        if message["type"] != "http.request":
            raise ClientGone
        self._has_more = message.get("more_body", False)
        if not self._has_more:
            self.connection.on_body_read()
        body: bytes = message.get("body", b"")
        return body

    def body_bound(self, limit_bytes: int) -> int:
        """Return an upper bound of the body's length in bytes. Raises as `check_length`."""
        self.check_length(limit_bytes)
        length = self.header(b"content-length")
        return (limit_bytes if self._has_more else 0) if length is None else int(length)

    @property
    def has_more(self) -> bool:
        """Whether a part of the request's body has not been read."""
        return self._has_more

    def check_length(self, limit_bytes: int) -> None:
        """Refuse a body by its Content-Length. Raises Refused(BodyTooLarge | InvalidRequest)."""
        length = self.header(b"content-length")
        if length is None:
            return
        if (nbytes := parse_whole_number(length)) is None:
            raise Refused(InvalidRequest("content-length", repr(length[:20]), "must be a whole number"))
        if nbytes > limit_bytes:
            raise Refused(BodyTooLarge(limit_bytes))

    def shield_from_disconnect(self, within_s: float) -> None:
        """Finish the request even if the client leaves. Extend its deadline to at least `within_s` from now."""
        self.connection.unwatch()
        self.connection.deadline_timer.extend_to(time.monotonic() + within_s)

    def cancel_on_disconnect(self, within_s: float | None = None) -> "ClientCancelScope":
        """Return a context manager that cancels its block when the client leaves or the time is over. The block then
        raises ClientGone or TimeoutError.
        """
        return ClientCancelScope(self.connection, within_s)

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> Awaitable[None]:
        """Send the head of the response. The connection closes afterwards if the request's body was not read to its
        end.
        """
        self.has_started = True
        closing: Headers = [(b"connection", b"close")] if self._has_more or self.closes_connection else []
        return self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*self.base_headers, *self.rate_headers, *headers, *closing],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send a piece of the body. Returns once the socket has accepted it. Raises ClientGone."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self.wait_delivered()

    def finish(self, data: bytes) -> Awaitable[None]:
        """Send the last piece of the body."""
        return self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def wait_delivered(self) -> None:
        """Wait until the socket has accepted everything. Raises ClientGone, also if nothing moves for `stall_s`."""
        if self.connection.is_all_accepted():
            return
        try:
            async with asyncio.timeout(self._stall_s):
                if await self.connection.wait_all_accepted():
                    return
        except TimeoutError:
            self.connection.abort()
        raise ClientGone

    async def respond(self, status: int, content_type: bytes, body: bytes, headers: Headers | None = None) -> None:
        """Send a complete response."""
        length = str(len(body)).encode()
        await self.start(status, [(b"content-type", content_type), (b"content-length", length), *(headers or [])])
        await self.finish(body)


class ClientCancelScope:
    """A block that is cancelled when the client leaves or its time is over. It needs one watcher and one timer in
    total. Both cancel the task as `asyncio.timeout` does. A cancellation from elsewhere passes through.
    """

    __slots__ = ("_cancellations", "_cancelling_before", "_connection", "_is_disconnected", "_task", "_within_s")

    def __init__(self, connection: Connection, within_s: float | None) -> None:
        self._connection = connection
        self._within_s = within_s
        self._cancellations = 0  # cancellations requested by this scope
        self._is_disconnected = False

    def __enter__(self) -> asyncio.Task[object]:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling_before = task, task.cancelling()
        if self._within_s is not None:
            self._connection.deadline_timer.set(time.monotonic() + self._within_s, self._cancel)
        self._connection.watch(self._on_disconnect)
        return task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._within_s is not None:
            self._connection.deadline_timer.clear(self._cancel)
        self._connection.unwatch(self._on_disconnect)
        for _ in range(self._cancellations):
            self._task.uncancel()
        if (
            self._cancellations
            and kind is asyncio.CancelledError
            and self._task.cancelling() <= self._cancelling_before
        ):
            raise (ClientGone if self._is_disconnected else TimeoutError) from None

    def _on_disconnect(self) -> None:
        self._is_disconnected = True
        self._cancel()

    def _cancel(self) -> None:
        self._cancellations += 1
        self._task.cancel()
