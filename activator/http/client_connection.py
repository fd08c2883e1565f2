"""A client's connection: the sockets, what they have taken, whether the client is there, and how long it may idle.

Puts itself into the scope as the extension `kelvin.connection`. HTTP/1.1 is `edge_http`'s.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.http.address_limits_policy import is_padded, is_slow
from activator.http.listener_state import ConnectionLimits, ListenerState
from activator.http.request_response_cycle import RequestResponseCycle
from kelvin.contracts.errors import Unavailable

EXTENSION: Final = "kelvin.connection"


class ClientConnection(asyncio.Protocol):
    """From the end of its TLS handshake on. A base and no part, so that no frame is on the way of each write."""

    raw: asyncio.Transport  # below TLS; set by the edge, as the next
    source: str | None  # whom the connection counts for; None: one of our own

    def __init__(
        self, listener_state: ListenerState, config: Config, server_state: ServerState, loop: asyncio.AbstractEventLoop
    ) -> None:
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self._loop = loop
        self._server = server_state
        self._listener_state = listener_state
        self._limits = listener_state.limits
        self._is_open = False
        self.is_full = False
        self._taken = asyncio.Event()  # set each time that something left, and when the client goes
        self._gone: Callable[[], None] | None = None
        self._idle_s = listener_state.limits.idle_s
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def shutdown(self) -> None:
        """The server ends: finish what is under way."""

    @abstractmethod
    def _on_idle(self) -> None:
        """Nothing was asked for as long as may be."""

    def unaccepted(self) -> int:
        """Bytes of what was sent that the client-side socket has not taken."""
        return self.raw.get_write_buffer_size() + self._transport.get_write_buffer_size()

    def is_connected(self) -> bool:
        """Whether the client can be told anything more."""
        return self._is_open and not self._transport.is_closing()

    def is_accepted(self) -> bool:
        """Whether the socket has taken all of the answer so far, and the client is there."""
        return self.unaccepted() == 0 and self.is_connected()

    async def accepted(self) -> bool:
        """Wait until it has; False where the client has gone."""
        while self.is_connected():
            if self.is_accepted():
                return True
            self._taken.clear()
            await self._taken.wait()
        return False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once if the client goes before the answer is complete, or has gone already."""
        self._gone = gone
        if not self._is_open:
            self._loop.call_soon(lambda: self._client_left(is_answered=False))

    def unwatch(self, gone: Callable[[], None] | None = None) -> None:
        """The request is over, or nobody needs to be told; with `gone` that one, and not who watches by now."""
        if gone is None or gone == self._gone:
            self._gone = None

    def _client_left(self, *, is_answered: bool) -> None:
        """The client has gone; who watches is told unless it had all."""
        gone, self._gone = self._gone, None
        if gone is not None and not is_answered:
            gone()

    def _serve(self, cycle: RequestResponseCycle) -> None:
        """Have the request served as soon as it may begin."""
        self._listener_state.request_starter.enter(_PendingRequest(self, cycle))

    def begin(self, cycle: RequestResponseCycle) -> None:
        """Start the task that serves the request."""
        self._server.tasks.add(self._loop.create_task(cycle.run(self._app)))

    def refuse(self, cycle: RequestResponseCycle) -> None:
        """Answer what nothing behind the edge has seen: the drain's time is over."""
        over = Unavailable("this activator")
        self._listener_state.metrics.refused(over)
        cycle.refuse(over)

    def task_ended(self) -> None:
        """The task that served a request ends."""
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
        if self._listener_state.is_replaced:
            self._idle_s = self._limits.lame_duck_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = self.is_full = False
        self._stop_idle_timer()
        self._server.connections.discard(self)
        self._taken.set()
        self._transport.close()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.raw_drained()

    def raw_drained(self) -> None:
        """The raw socket took what it had."""
        if self._is_open and self.unaccepted() == 0:
            self._taken.set()

    # How long it may be idle.

    def _idle_from_now(self) -> None:
        """Until something is asked; that only notes that it came."""
        self._idle_since_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._judge_idle)

    def _lame_duck(self) -> None:
        """From now on it may be idle for less."""
        self._idle_s = self._limits.lame_duck_s
        if self._idle_since_s is not None:
            self._stop_idle_timer()
            self._idle_from_now()

    def _judge_idle(self) -> None:
        """One timer goes on for as long as the connection lives."""
        self._idle_timer = None
        if self._idle_since_s is None or self._transport.is_closing():
            return
        left_s = self._idle_since_s + self._idle_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._judge_idle)
        else:
            self._on_idle()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class _PendingRequest:
    """A request before its task; see gate.PendingRequest."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    @property
    def source(self) -> str | None:
        return self._connection.source

    def credential(self) -> bytes:
        return next((value for name, value in self._cycle.scope["headers"] if name == b"authorization"), b"")

    def try_begin(self) -> bool:
        if self._cycle.disconnected:
            return False
        self._connection.begin(self._cycle)
        return True

    def refuse(self) -> None:
        if not self._cycle.disconnected:
            self._connection.refuse(self._cycle)


class BodyRateMonitor:
    """How the bodies of one connection come: how they are framed, and whether slower than a body may while nobody but
    its sender holds it up. What is slow or padded is `address_limits_policy`'s to say.

    `is_held`: whether we, and not the client, hold it up just now; `is_late` is called once a window was too slow.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
        is_held: Callable[[], bool],
        is_late: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._loop = loop
        self._is_held = is_held
        self._is_late = is_late
        self._raw_bytes = 0  # with what frames it
        self._bytes = 0
        self._before = 0  # of these, before the window that is timed
        self._was_held = False
        self._timer: asyncio.TimerHandle | None = None

    def read(self, nbytes: int) -> None:
        """So much was read behind the head."""
        self._raw_bytes += nbytes

    def record_body_bytes(self, nbytes: int) -> None:
        """So much of it was the body."""
        self._bytes += nbytes
        self._was_held = self._was_held or self._is_held()

    @property
    def is_padded(self) -> bool:
        """Whether its frames are out of all proportion to it."""
        return is_padded(self._raw_bytes, self._bytes, self._limits.head_bytes)

    def watch(self) -> None:
        """It is not whole yet: from now on windows are timed."""
        if self._timer is None:
            self._before = self._bytes
            self._was_held = self._is_held()
            self._timer = self._loop.call_later(self._limits.head_s, self._judge)

    def stop(self) -> None:
        """It is whole, or nobody waits for it: the next one begins anew."""
        self._raw_bytes = self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _judge(self) -> None:
        """A window has passed."""
        self._timer = None
        if self._was_held or not is_slow(self._bytes - self._before, self._limits.head_s, self._limits.body_rate):
            self.watch()
        else:
            self._is_late()
