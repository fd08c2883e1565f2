"""Run one asyncio service until a signal, or until its supervisor ends (its lifeline)."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kelvin.process.loops import ready_while_loops_work
from kelvin.process.procfs import is_orphaned
from kelvin.process.request_context import with_request_context

log = logging.getLogger(__name__)

DRAIN_S: Final = 30
ORPHAN_GRACE_S: Final = 2.0
_FRAMING: Final = (b"content-length", b"transfer-encoding")
GC_THRESHOLD: Final = 10_000  # objects: a few requests hold more than the default of 700, none of them garbage


class Stop(asyncio.Event):
    """Set when a service must end. `orphaned`: its supervisor is gone, so it exits within ORPHAN_GRACE_S seconds."""

    orphaned = False


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers. The service has its own, and uvicorn would raise signals again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve as uvicorn does. If cancelled, close the port and cut all connections, which uvicorn does not."""
        try:
            await super().serve(sockets)
        except asyncio.CancelledError:
            await self.abort_connections(sockets or [])
            raise

    async def serve_until(self, stop: asyncio.Event, sockets: list[socket.socket]) -> None:
        """Serve until `stop`, then drain."""

        async def end() -> None:
            await stop.wait()
            self.should_exit = True

        async with asyncio.TaskGroup() as tasks:
            ender = tasks.create_task(end())
            await self.serve(sockets)
            ender.cancel()

    async def abort_connections(self, sockets: list[socket.socket]) -> None:
        """Close listeners and connections and cancel running requests at once."""
        for each in (*getattr(self, "servers", ()), *sockets):  # `servers` does not exist before the start
            each.close()
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if running_tasks := set(self.server_state.tasks):
            for task in running_tasks:
                task.cancel()
            await asyncio.wait(running_tasks)


class InnerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which refuses an upgrade request with a body. The parser ends such a message after
    its head and would read the body as the next request. Our clients never send it.
    """

    def on_headers_complete(self) -> None:
        """Raise ValueError for such a request. uvicorn then answers 400 and closes."""
        if self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers):
            raise ValueError("an upgrade with a body")
        super().on_headers_complete()


def uvicorn_config(app: ASGIApp, drain_s: int) -> uvicorn.Config:
    """Return the HTTP/1.1 configuration of all our services, with `drain_s` seconds to finish running requests."""
    return uvicorn.Config(
        app,
        http=InnerProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
        ws="none",
    )


async def serve_until(app: ASGIApp, listener: socket.socket, stop: asyncio.Event, drain_s: int = DRAIN_S) -> None:
    """Serve HTTP/1.1 on `listener` until `stop`, then finish running requests for at most `drain_s` seconds."""
    await Server(uvicorn_config(with_request_context(ready_while_loops_work(app)), drain_s)).serve_until(
        stop, [listener]
    )


def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> None:
    """Call `stop` on SIGTERM, on Ctrl-C and when the terminal hangs up (SIGHUP), so that each of them drains. Under
    `nohup`, which ignores SIGHUP, it stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop)


def run_service(main: Callable[[Stop], Awaitable[None]], lifeline_fd: int | None) -> None:
    """Run `main(stop)` on uvloop. `stop` is set by SIGTERM, SIGINT, SIGHUP, or when `lifeline_fd` reaches its end. If
    the lifeline has ended already, `main` is not run: another installation may use the same directory by now.
    """
    if is_orphaned(lifeline_fd):
        log.warning("the supervisor is gone; not starting")
        return
    gc.collect()
    gc.set_threshold(GC_THRESHOLD)
    gc.freeze()  # else each full collection scans all imported modules: 60-130 ms instead of 3
    uvloop.run(_supervised(main, lifeline_fd))


async def _supervised(main: Callable[[Stop], Awaitable[None]], lifeline_fd: int | None) -> None:
    stop, loop = Stop(), asyncio.get_running_loop()
    stop_on_signals(loop, stop.set)
    if lifeline_fd is not None:

        def end_orphan() -> None:
            loop.remove_reader(lifeline_fd)
            log.warning("the supervisor is gone; ending")
            stop.orphaned = True
            stop.set()
            loop.call_later(ORPHAN_GRACE_S, os._exit, 1)  # no supervisor is left to end a hung drain

        loop.add_reader(lifeline_fd, end_orphan)
    await main(stop)
