"""The health port serves three routes, one request per connection, to a bounded number of connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from kelvin.contracts.roles import Role
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc import health_port
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.peer_settings import PeerSettings, read_peer_settings
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import listen

PLACE = ("127.0.0.1", 0)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reply to every path, so that only the port can hide one."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"here"})


@contextlib.asynccontextmanager
async def served(lifetime_s: float = 10.0) -> AsyncIterator[int]:
    """Serve the health port and yield its number."""
    stop = asyncio.Event()
    with listen(*PLACE) as listener:
        serving = asyncio.create_task(health_port.serve_health(app, listener, stop, 1, lifetime_s))
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            async with asyncio.timeout(30):
                await serving


async def read_reply(port: int, sent: bytes) -> bytes:
    """Return all bytes until the connection ends."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(PLACE[0], port)
        try:
            writer.write(sent)
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def request_bytes(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.uvloop
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(request_bytes("/healthz"), 200, id="liveness"),
        pytest.param(request_bytes("/readyz"), 200, id="readiness"),
        pytest.param(request_bytes("/metrics"), 200, id="metrics"),
        pytest.param(request_bytes("/readyz?verbose=1"), 200, id="a query"),
        pytest.param(request_bytes("/healthz", "POST"), 404, id="another method"),
        pytest.param(request_bytes("/healthz/"), 404, id="another path"),
        pytest.param(request_bytes("/%61dmin/v1/tenants"), 404, id="an escaped path"),
        pytest.param(request_bytes("/internal/v1/backup"), 404, id="an internal route"),
        pytest.param(request_bytes("/admin/v1/tenants"), 404, id="an admin route"),
    ],
)
async def test_health_port_serves_three_routes(sent: bytes, status: int) -> None:
    """Other paths are 404, although the application replies to all. The connection closes after one response."""
    async with served() as port:
        head, _, body = (await read_reply(port, sent + sent)).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"connection: close" in head
        assert body == (b"here" if status == 200 else b"")  # one response only


@pytest.mark.uvloop
async def test_silent_health_connection_is_cut() -> None:
    """A connection that sends nothing, or half a request, is closed after its lifetime."""
    async with served(lifetime_s=0.2) as port:
        assert await read_reply(port, b"") == b""
        assert await read_reply(port, b"GET /healthz HTTP/1.1\r\nHost:") == b""


@pytest.mark.uvloop
async def test_health_port_bounds_connections() -> None:
    """A connection above the limit is closed. Once another has left, requests are served again."""
    async with served(lifetime_s=60.0) as port:
        held = [await asyncio.open_connection(PLACE[0], port) for _ in range(health_port.MAX_CONNECTIONS)]
        assert await read_reply(port, request_bytes("/healthz")) == b""
        held.pop()[1].close()
        async with asyncio.timeout(30):
            while not (await read_reply(port, request_bytes("/healthz"))).startswith(b"HTTP/1.1 200"):
                await asyncio.sleep(0)
        for _, writer in held:
            writer.close()


@pytest.mark.uvloop
async def test_health_port_is_served_beside_the_socket(tmp_path: Path) -> None:
    """A process with a health address serves it without a certificate, beside its socket."""
    with socket.socket() as free:
        free.bind(PLACE)
        port = free.getsockname()[1]
    peer_settings, stop = PeerSettings(health=(PLACE[0], port)), asyncio.Event()
    with contextlib.closing(SocketDirectory(tmp_path / "run")) as directory:
        async with open_internal_server(directory, peer_settings, Role.SNAPSHOTTER) as inner:
            with pytest.raises(BadSetting, match=f"KELVIN_HEALTH_LISTEN={PLACE[0]}:{port}: can't be listened on"):
                async with open_internal_server(directory, peer_settings, Role.SNAPSHOTTER):
                    pass
            serving = asyncio.create_task(inner.serve(app, directory.listen("x.sock"), {}, stop, 1))
            assert (await read_reply(port, request_bytes("/readyz"))).endswith(b"here")
            stop.set()
            await serving
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(PLACE[0], port)


def test_health_listen_setting_is_read() -> None:
    """Every role reads the setting except runtimes, because a host has several of them."""
    env = {"KELVIN_HEALTH_LISTEN": "0.0.0.0:7480"}
    for role in (Role.ACTIVATOR, Role.CONTROLPLANE, Role.SNAPSHOTTER):
        assert read_peer_settings(env, role) == PeerSettings(health=("0.0.0.0", 7480))
    assert read_peer_settings(env, Role.RUNTIME).health is None
    with pytest.raises(BadSetting, match="KELVIN_HEALTH_LISTEN=7480: must be ADDRESS:PORT"):
        read_peer_settings({"KELVIN_HEALTH_LISTEN": "7480"}, Role.ACTIVATOR)
