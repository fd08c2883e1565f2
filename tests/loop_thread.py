"""Run an event loop in a thread, so that a blocking test can talk to servers in its own process."""

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
    """Run `main(stop)` in a thread until the block ends, on uvloop if `quick`. Yield the thread.
    The thread ends early if `main` returns. An error of `main` is raised when the block ends.
    """
    begun = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    failed: list[BaseException] = []

    async def run_main() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        begun.set()
        await main(stop)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if quick else None) as runner:
                runner.run(run_main())
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
            except RuntimeError:  # the loop has ended and is closed
                break
        thread.join(END_S)
        assert not thread.is_alive(), "the loop did not end"
        if failed:
            raise failed[0]


@contextmanager
def running_http_server(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run an HTTP server on a local port that answers with `answer`. Yield the port."""

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
