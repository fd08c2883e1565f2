"""Raw connections, with TLS or without, that report which bytes the client-side socket has accepted.

With TLS, the connection holds both transports: the TLS one and the raw one below it. This module sits between the
listening socket and `http1_protocol.py`. `docs/design/0001-http-server.md` explains the design.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.http.http1_protocol import Http1Protocol
from activator.http.listener_state import ListenerState


def tls_protocol_factory(listener_state: ListenerState) -> type[asyncio.Protocol]:
    """Return a function in place of uvicorn's protocol class. uvicorn only ever calls it."""

    def make(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        return TlsHandshakeProtocol(
            listener_state, Http1Protocol(listener_state, config, server_state, app_state, _loop)
        )

    return cast(type[asyncio.Protocol], make)


class TlsHandshakeProtocol(asyncio.Protocol):
    """A connection until its handshake has ended. Afterwards it only releases the connection's place."""

    def __init__(self, listener_state: ListenerState, http: Http1Protocol) -> None:
        self._listener_state = listener_state
        self._http = http
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        peer = raw.get_extra_info("peername") or ("",)  # none of one that is gone again
        is_admitted, self._source = self._listener_state.try_admit_connection(peer[0], self._loop.time())
        if not is_admitted:
            raw.abort()
            return
        self._http.source = self._source
        raw.set_write_buffer_limits(high=0)
        self._http.raw = self._raw = raw
        # The first step of start_tls must run now: as a task it would run after the first read, and lose that data.
        self._handshake = cast(
            Any,
            self._loop.start_tls(
                raw,
                self._http,
                self._listener_state.context,
                server_side=True,
                ssl_handshake_timeout=self._listener_state.limits.handshake_s,
                ssl_shutdown_timeout=self._listener_state.limits.handshake_s,
            ),
        )
        waiter = self._handshake.send(None)
        waiter._asyncio_future_blocking = False
        waiter.add_done_callback(self._finish)

    def connection_lost(self, exc: Exception | None) -> None:
        """Do nothing. Only a refused connection arrives here: TLS has taken over the others."""

    def data_received(self, data: bytes) -> None:
        if not self._raw_is_refused():
            raise AssertionError("bytes before TLS")

    def _raw_is_refused(self) -> bool:
        return not hasattr(self, "_raw")

    def _finish(self, _: object) -> None:
        """Hand the connection to HTTP after the handshake. Runs before the first request is decrypted."""
        self._listener_state.record_handshake_ended()
        try:
            self._handshake.send(None)
        except StopIteration as end:
            tls: asyncio.Transport = end.value
        except (OSError, asyncio.CancelledError):
            self._on_closed()
            self._raw.abort()
            return
        tls_protocol = cast(Any, self._raw).get_protocol()
        if self._raw.is_closing() or tls_protocol is None:
            self._on_closed()
            return
        cast(Any, self._raw).set_protocol(_DrainObserver(tls_protocol, self._http, self._on_closed))
        self._http.connection_made(tls)
        # high=0 would never resume in uvloop: it pauses at a size of `high` or more.
        tls.set_write_buffer_limits(high=1, low=0)

    def _on_closed(self) -> None:
        self._listener_state.record_connection_closed(self._source)


class _DrainObserver(asyncio.BufferedProtocol):
    """A protocol between the socket and uvloop's TLS that reports when the socket accepted the last byte."""

    def __init__(self, tls_protocol: Any, http: Http1Protocol, on_closed: Callable[[], None]) -> None:
        for passed_on in ("get_buffer", "buffer_updated", "eof_received", "pause_writing"):
            setattr(self, passed_on, getattr(tls_protocol, passed_on))  # no Python call of ours per read
        self._tls_protocol = tls_protocol
        self._http = http
        self._on_closed = on_closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()
        self._tls_protocol.connection_lost(exc)

    def resume_writing(self) -> None:
        self._tls_protocol.resume_writing()
        self._http.on_raw_drained()


def plain_protocol_factory(listener_state: ListenerState) -> type[asyncio.Protocol]:
    """Return a function in place of uvicorn's protocol class. uvicorn only ever calls it."""
    return cast(type[asyncio.Protocol], partial(PlainHttp1Protocol, listener_state))


class PlainHttp1Protocol(Http1Protocol):
    """An HTTP/1.1 connection without TLS, for a port that only the cluster can reach. It has the same limits and the
    same known delivery. Its transport is the socket itself.
    """

    _may_enter = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        peer = raw.get_extra_info("peername") or ("",)  # none of one that is gone again
        self._may_enter, self.source = self._listener_state.try_admit_connection(peer[0], self._loop.time())
        if not self._may_enter:
            raw.abort()
            return
        self._listener_state.record_handshake_ended()  # without TLS there is no handshake
        self.raw = raw
        super().connection_made(raw)
        raw.set_write_buffer_limits(high=1, low=0)  # as behind TLS

    def connection_lost(self, exc: Exception | None) -> None:
        if self._may_enter:
            self._listener_state.record_connection_closed(self.source)
        super().connection_lost(exc)

    def unaccepted_bytes(self) -> int:
        return self.raw.get_write_buffer_size()
