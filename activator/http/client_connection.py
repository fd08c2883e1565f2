"""A client's connection: its sockets, what they have accepted, whether the client is connected, and the idle timeout.
The connection is in the ASGI scope as the extension `kelvin.connection`. `http1_protocol.py` adds HTTP/1.1.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.http.listener_state import ListenerState
from activator.http.request_response_cycle import RequestResponseCycle
from kelvin.contracts.errors import Unavailable

EXTENSION: Final = "kelvin.connection"


class ClientConnection(asyncio.Protocol):
    """A client connection after its TLS handshake. HTTP inherits from it: a delegate would cost a call per write."""

    raw: asyncio.Transport  # below TLS; `transports.py` sets it, and `source`
    source: str | None  # what the address limits count; None: a trusted address

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
        self.is_writing_paused = False
        self._delivery_changed = asyncio.Event()  # set when data was sent, or the client left
        self._on_disconnect: Callable[[], None] | None = None
        self._idle_s = listener_state.limits.idle_s
        self._idle_since_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def shutdown(self) -> None:
        """Close after the running request has finished, because the server ends."""

    @abstractmethod
    def _on_idle(self) -> None:
        """Handle a connection that sent no request within the idle timeout."""

    def unaccepted_bytes(self) -> int:
        """Return the sent bytes that the client-side socket has not accepted yet."""
        return self.raw.get_write_buffer_size() + self._transport.get_write_buffer_size()

    def is_connected(self) -> bool:
        """Return whether the client can still receive data."""
        return self._is_open and not self._transport.is_closing()

    def is_all_accepted(self) -> bool:
        """Return whether the socket has accepted the whole response so far, and the client is still connected."""
        return self.unaccepted_bytes() == 0 and self.is_connected()

    async def wait_all_accepted(self) -> bool:
        """Wait until the socket has accepted everything. Return False if the client left."""
        while self.is_connected():
            if self.is_all_accepted():
                return True
            self._delivery_changed.clear()
            await self._delivery_changed.wait()
        return False

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` once if the client leaves before its response is complete, or has left already."""
        self._on_disconnect = on_disconnect
        if not self._is_open:
            self._loop.call_soon(lambda: self._notify_disconnect(is_answered=False))

    def unwatch(self, on_disconnect: Callable[[], None] | None = None) -> None:
        """Stop watching. With `on_disconnect`, do nothing if another callback has replaced it."""
        if on_disconnect is None or on_disconnect == self._on_disconnect:
            self._on_disconnect = None

    def _notify_disconnect(self, *, is_answered: bool) -> None:
        """Call the watcher, unless the client has its whole response."""
        gone, self._on_disconnect = self._on_disconnect, None
        if gone is not None and not is_answered:
            gone()

    def _serve(self, cycle: RequestResponseCycle) -> None:
        """Serve the request as soon as the request starter allows it."""
        self._listener_state.request_starter.enter(_PendingRequest(self, cycle))

    def begin(self, cycle: RequestResponseCycle) -> None:
        """Start the task that serves the request."""
        self._server.tasks.add(self._loop.create_task(cycle.run(self._app)))

    def refuse(self, cycle: RequestResponseCycle) -> None:
        """Answer 503 here: the drain is over, so the application does not see this request."""
        refusal = Unavailable("this activator")
        self._listener_state.metrics.count_refusal(refusal)
        cycle.refuse(refusal)

    def on_task_ended(self) -> None:
        """Forget the current task, which calls this when its request is served."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._server.tasks.discard(task)

    # Called by the transports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._own_address = transport.get_extra_info("sockname")
        self._peer = transport.get_extra_info("peername")
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._is_open = True
        if self._listener_state.is_replaced:
            self._idle_s = self._limits.lame_duck_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = self.is_writing_paused = False
        self._stop_idle_timer()
        self._server.connections.discard(self)
        self._delivery_changed.set()
        self._transport.close()

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self.on_raw_drained()

    def on_raw_drained(self) -> None:
        """Wake the tasks that wait for delivery if TLS and the raw socket have sent everything."""
        if self._is_open and self.unaccepted_bytes() == 0:
            self._delivery_changed.set()

    # Idle timeout.

    def _idle_from_now(self) -> None:
        """Start the idle timeout. A new request only clears `_idle_since_s`; the timer keeps running."""
        self._idle_since_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)

    def _lame_duck(self) -> None:
        """Shorten the idle timeout, because another process has taken over the listener."""
        self._idle_s = self._limits.lame_duck_s
        if self._idle_since_s is not None:
            self._stop_idle_timer()
            self._idle_from_now()

    def _check_idle(self) -> None:
        """Report an idle connection, or rearm the timer. A connection has one timer for all its requests."""
        self._idle_timer = None
        if self._idle_since_s is None or self._transport.is_closing():
            return
        left_s = self._idle_since_s + self._idle_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._check_idle)
        else:
            self._on_idle()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class _PendingRequest:
    """A request whose task has not started. Implements `listener_state.PendingRequest`."""

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
