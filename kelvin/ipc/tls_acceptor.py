"""Accepts from a TCP port with mutual TLS: bounded in strangers, in connections, and in the time of a handshake."""

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
    """Gives `listener`'s connections to a `protocol` each, once their handshake has ended well."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        is_full: Callable[[], bool],
        refused: Callable[[OSError | None], None],
    ) -> None:
        """`refused` is told of each connection that gets no protocol, with what its handshake failed of, if it did."""
        self._listener = listener
        self._tls = tls
        self._protocol = protocol
        self._is_full = is_full
        self._refused = refused
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loops = Loops()
        self._open: dict[socket.socket, asyncio.BaseTransport] = {}  # what is closed goes with the next that comes

    def __repr__(self) -> str:
        return f"<TlsAcceptor shaking={self.handshakes}>"

    @property
    def handshakes(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._loops.start("accept", self._accept)

    async def close(self) -> None:
        """Ends handshakes, and accepts no more. Connections live on."""
        await self._loops.close()
        for task in self._handshakes:
            task.cancel()
        if self._handshakes:
            await asyncio.wait(self._handshakes)
        self._listener.close()

    async def end(self) -> None:
        """After `close` and a drain: cuts what is open still, or waits for the other end to say goodbye, too. On return
        no descriptor is left, so that the loop may be closed.
        """
        for transport in self._open.values():
            cast(asyncio.Transport, transport).abort()
        limit = time.monotonic() + CLOSE_S
        while self._forget_closed() and time.monotonic() < limit:  # noqa: ASYNC110  (a closed descriptor tells nobody)
            await asyncio.sleep(POLL_S)

    def _forget_closed(self) -> bool:
        """Whether something is left."""
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
                self._refused(None)
                sock.close()
                continue
            # In a context of its own: what requests on this connection report as errors is not this loop's.
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
            self._refused(error)
            sock.close()
        else:
            self._forget_closed()
            self._open[sock] = transport
