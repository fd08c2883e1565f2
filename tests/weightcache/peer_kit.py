"""What the tests of peers share: agents that know one another, and a node that behaves as a test wants it to."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from blobstore.files import FileStore
from service.node_tls import NodeTls
from tests.weightcache.kit import CountingStore, RunningAgent, running, settings_of
from weightcache.settings import CacheSettings, PeerSettings
from weightcache.sources import Verify, is_digest_of

SECRET = b"0123456789abcdef" * 4
HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in socks]


def url_of(port: int) -> str:
    return f"https://{HOST}:{port}"


def peered(root: Path, port: int, others: list[int], secret: bytes = SECRET) -> CacheSettings:
    """Settings of an agent that is asked at `port` and asks those at `others`."""
    peers = PeerSettings((HOST, port), tuple(url_of(other) for other in others), (secret,))
    return replace(settings_of(root), peers=peers)


@contextmanager
def node(
    root: Path, port: int, others: list[int], *, store: Path, secret: bytes = SECRET, verify: Verify = is_digest_of
) -> Iterator[tuple[RunningAgent, CountingStore]]:
    """An agent over the common store, and its own count of what it read there."""
    counting = CountingStore(FileStore(store))
    with running(peered(root, port, others, secret), counting, verify=verify) as agent:
        yield agent, counting


@contextmanager
def pretender(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], secret: bytes = SECRET
) -> Iterator[int]:
    """A node of the same secret that answers so. Yields its port."""
    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ports: list[int] = []
    up = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()
        runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        with socket.create_server((HOST, 0)) as sock:
            await web.SockSite(runner, sock, ssl_context=NodeTls([secret]).server()).start()
            ports.append(sock.getsockname()[1])
            stopping.append((asyncio.get_running_loop(), stop))
            up.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert up.wait(30)
        yield ports[0]
    finally:
        loop, stop = stopping[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection as `context` makes one."""
    sock = socket.create_connection((HOST, port), 10)
    try:
        return context.wrap_socket(sock, server_hostname=HOST)
    except BaseException:
        sock.close()
        raise


def ask(port: int, request: str, context: ssl.SSLContext | None = None) -> bytes:
    """All that comes back for one request, after which the connection ends; nothing where it is refused before."""
    found = b""
    with suppress(OSError), connected(port, context or NodeTls([SECRET]).client()) as sock:
        sock.sendall(request.encode())
        while piece := sock.recv(65536):
            found += piece
    return found
