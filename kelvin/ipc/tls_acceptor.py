"""Accept connections with mutual TLS. Bounds the handshakes, the connections, and the time of a handshake."""

import asyncio
import contextvars
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, cast

from kelvin.contracts.backoff import should_log
from kelvin.ipc.tcp_listener import enable_keepalive
from kelvin.process.loops import Loops

log = logging.getLogger(__name__)

MAX_HANDSHAKES: Final = 64
HANDSHAKE_S: Final = 5.0
CLOSE_S: Final = 2.0
POLL_S: Final = 0.001
ACCEPT_PAUSE_S: Final = 0.1


class TlsAcceptor:
    """Accepts connections and gives each a `protocol` after a successful handshake."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        is_full: Callable[[], bool],
        on_refused: Callable[[OSError | None], None],
    ) -> None:
        """`on_refused` is called for each connection that gets no protocol, with the error of its handshake, if any."""
        self._listener = listener
        self._tls = tls
        self._protocol = protocol
        self._is_full = is_full
        self._on_refused = on_refused
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loops = Loops()
        self._open: dict[socket.socket, asyncio.BaseTransport] = {}  # closed ones are removed at the next handshake

    def __repr__(self) -> str:
        return f"<TlsAcceptor shaking={self.handshakes}>"

    @property
    def handshakes(self) -> int:
        """Number of handshakes that run now."""
        return len(self._handshakes)

    def open(self) -> None:
        """Start the loop that accepts connections."""
        self._listener.setblocking(False)
        self._loops.start("accept", self._accept)

    async def close(self) -> None:
        """Stop accepting and cancel handshakes. Established connections stay."""
        await self._loops.close()
        for task in self._handshakes:
            task.cancel()
        if self._handshakes:
            await asyncio.wait(self._handshakes)
        self._listener.close()

    async def end(self) -> None:
        """Abort the remaining connections, after `close` and a drain, and wait until their descriptors are closed. It
        waits at most CLOSE_S. Then the event loop may be closed.
        """
        for transport in self._open.values():
            cast(asyncio.Transport, transport).abort()
        limit = time.monotonic() + CLOSE_S
        while self._forget_closed() and time.monotonic() < limit:  # noqa: ASYNC110  (closing sends no notification)
            await asyncio.sleep(POLL_S)

    def _forget_closed(self) -> bool:
        """Remove closed connections. Return whether any is left."""
        for sock in [sock for sock in self._open if sock.fileno() < 0]:
            del self._open[sock]
        return bool(self._open)

    async def _accept(self) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                failures += 1
                if should_log(failures):
                    log.error("accept failed", extra={"error": str(error), "failures": failures})
                await asyncio.sleep(ACCEPT_PAUSE_S)  # descriptors may have run out
                continue
            failures = 0
            if self.handshakes >= MAX_HANDSHAKES or self._is_full():
                self._on_refused(None)
                sock.close()
                continue
            # With its own context, so that errors reported by this connection's requests don't count as this loop's.
            task = asyncio.create_task(self._handshake(sock), context=contextvars.Context())
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            enable_keepalive(sock)
            transport, _ = await loop.connect_accepted_socket(
                self._protocol, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=CLOSE_S
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            self._on_refused(error)
            sock.close()
        else:
            self._forget_closed()
            self._open[sock] = transport
