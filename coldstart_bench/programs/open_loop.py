"""Open-loop client: send each request when it is due, whatever happened to earlier ones, and record every result.

It prints `ready`. `{"plan": FILE, "into": FILE}` is answered with `{}` once each request has ended, or the plan's
patience is over. The results are in the second file (`coldstart_bench/harness/load_protocol.py`).
"""

import asyncio
import gc
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import uvloop

from coldstart_bench.harness.load_protocol import (
    CUT,
    NO_DOOR,
    NO_END,
    HttpAnswerParser,
    LoadResult,
    OpenLoopPlan,
    ReaderKind,
    RequestResult,
    parse_answer,
)
from coldstart_bench.harness.process_stats import cpu_load, try_read_cpu_time
from coldstart_bench.programs.closed_loop import context
from coldstart_bench.programs.json_lines import answer_lines
from kelvin.contracts.wire import decoder

OPENING: Final = 32  # handshakes at once: each takes a millisecond of the activator's CPU
AGAIN_S: Final = 0.05  # pause after a refused connection
SLOW_S: Final = 0.05
TICK_S: Final = 0.001
SILENT_S: Final = 10.0  # after this time, a request whose client never reads counts as ended
SMALL_BYTES: Final = 4096
FIRST: Final = b"data: {"


class RequestInFlight:
    """One request that is due or sent, and not yet ended."""

    __slots__ = ("answer", "due_us", "first_us", "number", "payload", "reader", "seen_us", "sent_us")

    def __init__(self, number: int, due_us: int, seen_us: int, payload: int, reader: ReaderKind) -> None:
        self.number, self.due_us, self.seen_us, self.payload, self.reader = number, due_us, seen_us, payload, reader
        self.sent_us: int | None = None
        self.first_us: int | None = None
        self.answer = HttpAnswerParser()


class RequestProtocol(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, loop: "OpenLoop") -> None:
        self._loop = loop
        self._ticket: RequestInFlight | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no instances of it

    def begin(self, ticket: RequestInFlight, request: bytes) -> None:
        """Send the request and record when."""
        self._ticket = ticket
        ticket.sent_us = self._loop.now_us()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if (ticket := self._ticket) is None:
            return
        whole = ticket.answer.feed(data)
        if ticket.first_us is None and (not ticket.answer.is_stream or FIRST in ticket.answer.body):
            ticket.first_us = self._loop.now_us()
        if whole:
            self._ticket = None
            self._loop.ended(ticket, "")
            self._loop.is_free(self, once=ticket.reader is not ReaderKind.QUICK)
        elif ticket.reader is not ReaderKind.QUICK:
            self._transport.pause_reading()
            if ticket.reader is ReaderKind.SLOW:
                asyncio.get_running_loop().call_later(SLOW_S, self._resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        if (ticket := self._ticket) is not None:
            self._ticket = None
            self._loop.ended(ticket, CUT)
        self._loop.lost(self)

    def abort(self) -> None:
        """Close the connection without recording a result."""
        self._ticket = None
        self._transport.abort()

    def _resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


class OpenLoop:
    """Runs one plan, from its first connection to its last response."""

    def __init__(self, plan: OpenLoopPlan) -> None:
        self._plan = plan
        self._requests = [payload.request() for payload in plan.payloads]
        self._tls = context()
        self._free: list[RequestProtocol] = []
        self._open: set[RequestProtocol] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._due: deque[RequestInFlight] = deque()  # due requests that wait for a connection
        self._under_way: dict[int, RequestInFlight] = {}
        self._sent: dict[int, RequestResult] = {}
        self._texts: dict[str, int] = {}
        self._over = asyncio.Event()
        self._began_ns = time.monotonic_ns()
        self._next = 0

    def now_us(self) -> int:
        """Return the microseconds since the start of the plan."""
        return (time.monotonic_ns() - self._began_ns) // 1000

    async def run(self) -> LoadResult:
        """Run the whole plan. Raises OSError if the first connections are refused."""
        try:
            await self._open_all()
            self._began_ns, before = time.monotonic_ns(), try_read_cpu_time(os.getpid())
            self._pump()
            last_s = (self._plan.arrivals[-1][0] if self._plan.arrivals else 0) / 1e6
            try:
                async with asyncio.timeout(last_s + self._plan.patience_s):
                    await self._over.wait()
            except TimeoutError:
                self._next = len(self._plan.arrivals)
                for ticket in list(self._under_way.values()):
                    self.ended(ticket, NO_END)
            took = cpu_load(before, try_read_cpu_time(os.getpid()), len(self._plan.arrivals), self.now_us() / 1e6)
        finally:
            self._due.clear()
            for task in list(self._opening):
                task.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            for connection in list(self._open):
                connection.abort()
        sent = tuple(self._sent[number] for number in range(len(self._plan.arrivals)))
        return LoadResult(self._began_ns, sent, tuple(self._texts), took)

    def ended(self, ticket: RequestInFlight, why: str) -> None:
        """Record the result of a request."""
        if self._under_way.pop(ticket.number, None) is None:
            return
        answer = ticket.answer
        text, code, whole = parse_answer(answer)
        code = code or why or ("" if whole or answer.status != 200 else CUT)
        number = -1 if not text else self._texts.setdefault(text, len(self._texts))
        self._sent[ticket.number] = RequestResult(
            ticket.payload, ticket.due_us, ticket.sent_us, ticket.first_us, self.now_us(),
            answer.status, code, number, answer.retry_after, ticket.seen_us,
        )  # fmt: skip
        if not self._under_way and self._next == len(self._plan.arrivals):
            self._over.set()

    def is_free(self, connection: RequestProtocol, *, once: bool) -> None:
        """Use the connection for the next request. If `once`, close it, because it had a slow reader."""
        if once:
            connection.abort()
        elif self._due:
            self._send(connection, self._due.popleft())
        else:
            self._free.append(connection)

    def lost(self, connection: RequestProtocol) -> None:
        """Forget a closed connection and replace it."""
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        self._open_more()

    def _pump(self) -> None:
        """Send the requests that are due, and schedule the next call."""
        arrivals = self._plan.arrivals
        while self._next < len(arrivals) and arrivals[self._next][0] <= (now_us := self.now_us()):
            due_us, payload = arrivals[self._next]
            ticket = RequestInFlight(self._next, due_us, now_us, payload, self._plan.payloads[payload].reader)
            self._next += 1
            self._under_way[ticket.number] = ticket
            if self._free and ticket.reader is ReaderKind.QUICK:
                self._send(self._free.pop(), ticket)
            elif ticket.reader is ReaderKind.QUICK:
                self._due.append(ticket)
            else:
                self._begin(self._open_for(ticket))
        self._open_more()
        if self._next < len(arrivals):
            loop = asyncio.get_running_loop()
            # uvloop's timers have a resolution of 1 ms. A shorter timer fires at once, and the loop would spin.
            loop.call_at(loop.time() + max(TICK_S, (arrivals[self._next][0] - self.now_us()) / 1e6), self._pump)

    def _send(self, connection: RequestProtocol, ticket: RequestInFlight) -> None:
        connection.begin(ticket, self._requests[ticket.payload])

    def _open_more(self) -> None:
        room = min(OPENING, self._plan.most - len(self._open), len(self._due)) - len(self._opening)
        for _ in range(room):
            self._begin(self._open_next())

    def _begin(self, opening: Any) -> None:
        task = asyncio.get_running_loop().create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and not self._over.is_set():
            self._open_more()

    async def _open_next(self) -> None:
        """Open a connection for the request that waits longest. If it is refused, that request fails with NO_DOOR."""
        try:
            connection = await self._connect()
        except OSError:
            if self._due:
                self.ended(self._due.popleft(), NO_DOOR)
            await asyncio.sleep(AGAIN_S)
            return
        self.is_free(connection, once=False)

    async def _open_for(self, ticket: RequestInFlight) -> None:
        """Open a connection with a small receive buffer for a slow or silent reader."""
        try:
            connection = await self._connect(small=True)
        except OSError:
            self.ended(ticket, NO_DOOR)
            return
        self._send(connection, ticket)
        if ticket.reader is ReaderKind.SILENT:  # its connection stays open until the end of the plan
            asyncio.get_running_loop().call_later(SILENT_S, self.ended, ticket, NO_END)

    async def _connect(self, *, small: bool = False) -> RequestProtocol:
        plain = socket.socket()
        try:
            plain.setblocking(False)
            if small:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(plain, ("127.0.0.1", self._plan.port))
            _, connection = await loop.create_connection(
                lambda: RequestProtocol(self), sock=plain, ssl=self._tls, server_hostname="localhost"
            )
        except BaseException:
            plain.close()
            raise
        self._open.add(connection)
        return connection

    async def _open_all(self) -> None:
        limit = asyncio.Semaphore(OPENING)

        async def one() -> None:
            async with limit:
                self._free.append(await self._connect())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._plan.connections, self._plan.most)):
                group.create_task(one())


def main() -> None:
    """Answer lines until stdin ends."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # a full collection takes as long as many requests
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def answer(plan: str, into: str) -> dict[str, object]:
            ran = runner.run(OpenLoop(decoder(OpenLoopPlan).decode(Path(plan).read_bytes())).run())
            Path(into).write_bytes(msgspec.json.encode(ran))
            return {}

        answer_lines(answer)


if __name__ == "__main__":
    main()
