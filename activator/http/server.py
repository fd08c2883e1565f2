"""Listen and serve an ASGI application until told to stop, with TLS or without. After an orderly drain the process
exits 0. An address that can't be bound raises BadSetting.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from activator.http.listener_state import ListenerState
from activator.http.transports import plain_protocol_factory, tls_protocol_factory
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.tcp_listener import listen
from kelvin.process.service_lifecycle import Stop

ABORT_S: Final = 5.0
HANDSHAKE_POLL_S: Final = 0.02  # polling interval for handshakes
ORPHAN_DRAIN_S: Final = 1  # less than the lifeline's grace


def listen_for(host: str, port: int, inherited_fd: int | None) -> socket.socket:
    """Return the listening socket of the front door: the inherited one if there is one. Raises BadSetting."""
    if inherited_fd is not None:
        try:
            listener = socket.socket(fileno=inherited_fd)
        except OSError as error:
            raise BadSetting("KELVIN_LISTENER_FD", str(inherited_fd), "is no socket") from error
        listener.set_inheritable(False)
        return listener
    try:
        return listen(host, port)
    except socket.gaierror as error:
        raise BadSetting("KELVIN_HOST", host, error.strerror or "is no address") from error
    except OSError as error:
        rule = f"{host} refuses it: {os.strerror(error.errno or errno.EINVAL)}"
        raise BadSetting("KELVIN_PORT", str(port), rule) from error


def listen_plain(host: str, port: int) -> socket.socket:
    """Return the listening socket of Knative's data path. Raises BadSetting."""
    try:
        return listen(host, port)
    except OSError as error:
        rule = f"can't be listened on: {error.strerror or os.strerror(error.errno or errno.EINVAL)}"
        raise BadSetting("KELVIN_ACTIVATOR_LISTEN", f"{host}:{port}", rule) from error


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the service. uvicorn would raise them again after shutdown."""

    def __init__(self, config: uvicorn.Config, listener_state: ListenerState) -> None:
        super().__init__(config)
        self._listener_state = listener_state

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _wait_tasks_to_complete(self) -> None:
        try:
            while self._listener_state.open_handshakes:  # noqa: ASYNC110 -- uvicorn does not know these connections yet
                await asyncio.sleep(HANDSHAKE_POLL_S)
            await super()._wait_tasks_to_complete()
        # the drain is over: tasks are cancelled next, none may start
        except asyncio.CancelledError:
            self._listener_state.request_starter.close()
            raise


async def serve_tls(
    app: ASGIApp, listener_state: ListenerState, listener: socket.socket, stop: Stop, drain_s: int
) -> None:
    """Accept until `stop`, then finish requests for at most `drain_s` seconds. Then cancel running requests and refuse
    those that have not started.

    If the supervisor died (`stop.orphaned`), the drain lasts ORPHAN_DRAIN_S. If `listener_state.is_replaced` is set
    before `stop`, another process accepts from the same socket, and clients are told before their connection closes.
    """
    await _serve(app, tls_protocol_factory(listener_state), listener_state, listener, stop, drain_s)


async def serve_plain(
    app: ASGIApp, listener_state: ListenerState, listener: socket.socket, stop: Stop, drain_s: int
) -> None:
    """Serve as `serve_tls` does, without TLS."""
    await _serve(app, plain_protocol_factory(listener_state), listener_state, listener, stop, drain_s)


async def _serve(
    app: ASGIApp,
    protocol: type[asyncio.Protocol],
    listener_state: ListenerState,
    listener: socket.socket,
    stop: Stop,
    drain_s: int,
) -> None:
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # keys identify callers, and the socket gives their address
        date_header=False,
        timeout_keep_alive=listener_state.limits.idle_s,
        timeout_graceful_shutdown=drain_s,
    )
    server = _Server(config, listener_state)

    async def exit_on_stop() -> None:
        await stop.wait()
        if stop.orphaned:
            config.timeout_graceful_shutdown = ORPHAN_DRAIN_S
        server.should_exit = True

    async with asyncio.TaskGroup() as tasks:
        stop_task = tasks.create_task(exit_on_stop())
        await server.serve(sockets=[listener])
        stop_task.cancel()
    if cancelled_tasks := set(server.server_state.tasks):  # just cancelled; each still writes its usage record
        await asyncio.wait(cancelled_tasks, timeout=ABORT_S)
