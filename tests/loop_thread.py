"""A loop in a thread: what a test asks from its own thread, or from other processes, while it waits."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvloop
from aiohttp import web

HOST: Final = "127.0.0.1"
END_S: Final = 30.0

Main = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@contextmanager
def running_loop_thread(main: Main, *, quick: bool = False) -> Iterator[threading.Thread]:
    """`main(stop)` until the block is left, on uvloop if `quick`. Yields its thread, which ends early where `main`
    does; what it raised is raised here when the block ends.
    """
    begun = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    failed: list[BaseException] = []

    async def told() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        begun.set()
        await main(stop)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if quick else None) as runner:
                runner.run(told())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="loop")
    thread.start()
    try:
        assert begun.wait(END_S)
        yield thread
    finally:
        for loop, stop in loops:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:  # it has ended, and is closed
                break
        thread.join(END_S)
        assert not thread.is_alive(), "the loop did not end"
        if failed:
            raise failed[0]


@contextmanager
def running_http_server(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server of HTTP that answers so, on a port of this machine. Yields the port."""

    async def main(stop: asyncio.Event) -> None:
        runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            await stop.wait()
        finally:
            await runner.cleanup()

    with socket.create_server((HOST, 0)) as listener, running_loop_thread(main):
        yield listener.getsockname()[1]
