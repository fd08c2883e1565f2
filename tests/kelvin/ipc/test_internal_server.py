"""Internal servers over sockets and TLS: roles, settings, and certificates that change while serving."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from kelvin.contracts.errors import Refused
from kelvin.contracts.roles import Role
from kelvin.ipc.internal_server import InternalServer, open_internal_server
from kelvin.ipc.peer_settings import LOCAL_ONLY, PeerSettings
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import PROCESS_HEALTH, record_error
from tests.kelvin.crypto.pki import Authority, write

ONE, TWO = Authority("one"), Authority("two")
CONTROL, ACTIVATOR = "127.0.0.3", "127.0.0.2"
RULES = {
    "/fault": frozenset({Role.ACTIVATOR}),
    "/feed": frozenset({Role.ACTIVATOR}),
    "/name": frozenset({Role.ACTIVATOR, Role.RUNTIME}),
}
NAME = "KELVIN_CONTROL_LISTEN"


def _app() -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.get("/name")
    async def name() -> str:
        return "control"

    @app.get("/fault")
    async def fault() -> str:
        record_error(ValueError("of a request"), "a request")
        return "recorded"

    @app.get("/secret")
    async def secret() -> str:
        return "the backup"

    @app.get("/feed")
    async def feed() -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            while True:
                yield b"line\n"
                await asyncio.sleep(0)

        return StreamingResponse(lines())

    return app


@contextlib.asynccontextmanager
async def opened(place: Path, role: Role, peer_settings: PeerSettings = LOCAL_ONLY) -> AsyncIterator[InternalServer]:
    with contextlib.closing(SocketDirectory(place / "run")) as directory:
        async with open_internal_server(directory, peer_settings, role, NAME) as inner:
            yield inner


@contextlib.asynccontextmanager
async def control_plane(place: Path) -> AsyncIterator[InternalServer]:
    """Serve as the control plane, on its socket and on its own address."""
    files, stop = write(place / "pki", ONE.of(Role.CONTROLPLANE), ONE), asyncio.Event()
    with contextlib.closing(SocketDirectory(place / "run")) as directory:
        async with open_internal_server(directory, PeerSettings(files, (CONTROL, 0)), Role.CONTROLPLANE, NAME) as inner:
            serving = asyncio.create_task(inner.serve(_app(), directory.listen("control.sock"), RULES, stop, 1))
            try:
                yield inner
            finally:
                stop.set()
                await serving


async def call_route(inner: InternalServer, address: str, path: str = "/name") -> str:
    """Return the response, or the code of the failure."""
    client = ServiceClient.from_connector(
        inner.connector_factory.connector_to(address, Role.CONTROLPLANE), "the control plane"
    )
    try:
        return await client.call("GET", path, str, timeout_s=10)
    except Refused as refused:
        return refused.failure.code
    finally:
        await client.close()


@pytest.mark.uvloop
@pytest.mark.parametrize(
    ("role", "path", "want"),
    [
        pytest.param(Role.ACTIVATOR, "/name", "control", id="a route of one role"),
        pytest.param(Role.RUNTIME, "/name", "control", id="a route of several roles"),
        pytest.param(Role.AGENT, "/name", "not_found", id="a route of other roles"),
        pytest.param(Role.RUNTIME, "/feed", "not_found", id="the feed, which is for activators"),
        pytest.param(Role.ACTIVATOR, "/secret", "not_found", id="a route without a rule"),
        pytest.param(Role.ACTIVATOR, "/nowhere", "not_found", id="a missing route"),
    ],
)
async def test_role_reaches_only_its_routes(role: Role, path: str, want: str, tmp_path: Path) -> None:
    """A route that the role may not call looks as if it didn't exist."""
    peer_settings = PeerSettings(write(tmp_path / "pki", ONE.of(role), ONE))
    async with control_plane(tmp_path / "c") as control, opened(tmp_path / "x", role, peer_settings) as inner:
        assert control.url.startswith(f"https://{CONTROL}:")
        assert await call_route(inner, control.url, path) == want


@pytest.mark.uvloop
async def test_errors_of_requests_are_no_loops(tmp_path: Path) -> None:
    """An error in a request isn't counted for the loop that accepts connections."""
    peer_settings = PeerSettings(write(tmp_path / "pki", ONE.of(Role.ACTIVATOR), ONE))
    before = PROCESS_HEALTH.errors.total()
    async with control_plane(tmp_path / "c") as control, opened(tmp_path / "x", Role.ACTIVATOR, peer_settings) as inner:
        assert await call_route(inner, control.url, "/fault") == "recorded"
        assert PROCESS_HEALTH.errors.total() == before


@pytest.mark.uvloop
async def test_the_socket_of_this_host_has_no_rules(tmp_path: Path) -> None:
    """The socket of this host needs no certificate and allows every route."""
    async with control_plane(tmp_path), opened(tmp_path, Role.AGENT) as inner:
        assert await call_route(inner, "control.sock", "/secret") == "the backup"
        with pytest.raises(ValueError, match="no certificate for other hosts"):
            inner.connector_factory.connector_to(f"https://{CONTROL}:1", Role.CONTROLPLANE)


@pytest.mark.uvloop
async def test_a_stranger_costs_a_handshake(tmp_path: Path) -> None:
    """A client of another authority gets no HTTP response, over TLS or in plain text. Others are still served."""
    peer_settings = PeerSettings(write(tmp_path / "pki", TWO.of(Role.ACTIVATOR), TWO, ONE))
    good = PeerSettings(write(tmp_path / "good", ONE.of(Role.ACTIVATOR), ONE))
    async with (
        control_plane(tmp_path / "c") as control,
        opened(tmp_path / "x", Role.ACTIVATOR, peer_settings) as stranger,
        opened(tmp_path / "y", Role.ACTIVATOR, good) as inner,
        aiohttp.ClientSession() as plain,
    ):
        url = control.url
        assert await call_route(stranger, url) == "unavailable"
        with pytest.raises(aiohttp.ClientError):
            await plain.get(url.replace("https:", "http:") + "/name")
        assert await call_route(inner, url) == "control"
        client = ServiceClient.from_connector(inner.connector_factory.connector_to(url, Role.CONTROLPLANE), "x")
        with pytest.raises(aiohttp.NonHttpUrlClientError):  # Kelvin's own client never uses plain HTTP either
            await client.session.get(url.replace("https:", "http:") + "/name")
        await client.close()


@pytest.mark.uvloop
@pytest.mark.parametrize(
    "scheme", [pytest.param("", id="by its socket"), pytest.param("https", id="from another host")]
)
async def test_aborted_server_accepts_no_more(scheme: str, tmp_path: Path) -> None:
    """Its streams end, it accepts no connections, and another server can listen in the same process."""
    files, stop = write(tmp_path / "pki", ONE.of(Role.CONTROLPLANE), ONE), asyncio.Event()
    peer_settings = PeerSettings(write(tmp_path / "good", ONE.of(Role.ACTIVATOR), ONE))
    port = 0
    for _ in range(2):
        with contextlib.closing(SocketDirectory(tmp_path / "run")) as directory:
            async with (
                open_internal_server(
                    directory, PeerSettings(files, (CONTROL, port)), Role.CONTROLPLANE, NAME
                ) as control,
                opened(tmp_path, Role.ACTIVATOR, peer_settings) as inner,
            ):
                work = control.serve(_app(), directory.listen("control.sock"), RULES, stop, 1)
                serving = asyncio.create_task(work)
                port = int(control.url.rsplit(":", 1)[1])
                address = control.url if scheme else "control.sock"
                client = ServiceClient.from_connector(
                    inner.connector_factory.connector_to(address, Role.CONTROLPLANE), "x"
                )
                async with client.open("GET", "/feed") as stream:
                    assert await stream.content.readline() == b"line\n"
                    serving.cancel()
                    await asyncio.wait([serving])
                    assert serving.cancelled()
                    with pytest.raises(aiohttp.ClientError):
                        async with asyncio.timeout(20):
                            await stream.read()
                assert await call_route(inner, address) == "unavailable"
                await client.close()


@pytest.mark.uvloop
async def test_a_host_that_vanishes_is_noticed(tmp_path: Path) -> None:
    """A client's connections use TCP keep-alive and a user timeout, so that a silent host is noticed."""

    def asks(transport: asyncio.BaseTransport | None) -> bool:
        assert transport is not None
        made = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        with made:
            kept = made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            return bool(kept) and made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000

    class Raw(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

    peer_settings = PeerSettings(write(tmp_path / "pki", ONE.of(Role.ACTIVATOR), ONE))
    async with control_plane(tmp_path / "c") as control, opened(tmp_path / "x", Role.ACTIVATOR, peer_settings) as inner:
        connector = inner.connector_factory.connector_to(control.url, Role.CONTROLPLANE)
        raw = await connector.connect(Raw)
        assert asks(raw.transport)
        raw.transport.close()
        client = ServiceClient.from_connector(connector, "x")
        async with client.open("GET", "/feed") as answer:
            assert answer.connection is not None
            assert asks(answer.connection.transport)
        await client.close()


@pytest.mark.uvloop
async def test_certificates_rotate_under_load(tmp_path: Path) -> None:
    """Certificates and authorities are replaced many times, also with half-written files. No request fails on new or
    old connections, and a stream continues from the first to the last certificate."""
    there, here = tmp_path / "c" / "pki", tmp_path / "pki"
    peer_settings = PeerSettings(write(here, ONE.of(Role.ACTIVATOR), ONE))
    async with control_plane(tmp_path / "c") as control, opened(tmp_path / "x", Role.ACTIVATOR, peer_settings) as inner:
        connector = inner.connector_factory.connector_to(control.url, Role.CONTROLPLANE)
        kept, stop, answered, failed = ServiceClient.from_connector(connector, "kept"), asyncio.Event(), 0, 0

        async def load(*, new_client: bool) -> None:
            nonlocal answered, failed
            while not stop.is_set():
                client = ServiceClient.from_connector(connector, "anew") if new_client else kept
                try:
                    answered += await client.call("GET", "/name", str, timeout_s=30) == "control"
                except Refused:
                    failed += 1
                finally:
                    if new_client:
                        await client.close()

        async def turn(of: Authority, *bundle: Authority) -> None:
            """Write the files in pieces and reload after each."""
            seen = answered
            for place, role in ((there, Role.CONTROLPLANE), (here, Role.ACTIVATOR)):
                pair = of.of(role)
                (place / "tls.crt").write_bytes(pair.certificate[:200])
                await identities[place].reload()
                (place / "tls.crt").write_bytes(pair.certificate)
                await identities[place].reload()
                write(place, pair, *bundle)
                await identities[place].reload()
            async with asyncio.timeout(60):
                while answered < seen + 8:
                    await asyncio.sleep(0)

        assert inner.identity is not None
        assert control.identity is not None
        identities = {here: inner.identity, there: control.identity}
        async with kept.open("GET", "/feed") as stream:
            tasks = [asyncio.create_task(load(new_client=new_client)) for new_client in (True, True, False)]
            for _ in range(3):
                await turn(ONE, ONE, TWO)
                await turn(TWO, ONE, TWO)
                await turn(TWO, TWO)
                await turn(TWO, ONE, TWO)
                await turn(ONE, ONE, TWO)
                await turn(ONE, ONE)
            assert await stream.content.readline() == b"line\n"
            stop.set()
            await asyncio.gather(*tasks)
        await kept.close()
        assert failed == 0
