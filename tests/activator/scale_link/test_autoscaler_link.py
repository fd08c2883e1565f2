"""The link to Knative's autoscaler over a real WebSocket: sent stats, outages, and connections that hang."""

import asyncio
import base64
import hashlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
import uvloop

from activator.routing.policy.version_key import VersionKey
from activator.scale_link import autoscaler_link
from activator.scale_link.autoscaler_link import AutoscalerLink
from kelvin.contracts.serving.control_messages import ConcurrencyStat, RevisionRow
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.eventually import eventually

POD = "activator-7"
M, N, UNKNOWN = (VersionKey("t", name, "v") for name in ("m", "n", "nobody"))
ROWS = {
    key: RevisionRow(tenant="t", model=key.model, version="v", namespace="ns", name=f"{key.model}-1") for key in (M, N)
}


def stat(key: VersionKey, concurrency: float, requests: int = 0) -> ConcurrencyStat:
    return ConcurrencyStat(**key._asdict(), concurrency=concurrency, requests=requests)


@asynccontextmanager
async def autoscaler() -> AsyncIterator[StrictAutoscaler]:
    """Start an autoscaler that knows the revisions. At the end it must have received nothing wrong."""
    server = StrictAutoscaler(*(f"{row.namespace}/{row.name}" for row in ROWS.values()))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
    assert server.wrong == []


@asynccontextmanager
async def linked(server: StrictAutoscaler, *, waits_open: bool = True) -> AsyncIterator[AutoscalerLink]:
    """Run a link to it. If `waits_open`, wait until it is connected."""
    link = AutoscalerLink(server.url, POD, ROWS.get)
    running = asyncio.create_task(link.run())
    try:
        if waits_open:
            await eventually(lambda: link.is_open)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert link.session is None


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """Listen on a port that opens WebSockets and reads nothing from them."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"(?i)\r\nsec-websocket-key: (\S+)", head)
        assert found is not None
        accept = base64.b64encode(hashlib.sha1(found[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        opened = (b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade")
        writer.write(b"\r\n".join((*opened, b"Sec-WebSocket-Accept: " + accept, b"", b"")))
        try:
            await over.wait()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        over.set()


async def test_sent_stats_reach_the_autoscaler() -> None:
    """Several revisions share a message. `send` returns False for a version without a Revision."""
    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 1.0, 1),))
        assert await link.send((stat(M, 0.25), stat(N, 3.5, 2)))
        assert not await link.send((stat(UNKNOWN, 1.0),))
        assert not await link.send((stat(UNKNOWN, 1.0), stat(N, 0.0)))
        await server.until(lambda server_state: len(server_state.stats) == 4)
        assert [each[1:] for each in server.stats] == [
            (0, "ns/m-1", POD, 1.0, 1.0),
            (1, "ns/m-1", POD, 0.25, 0.0),
            (1, "ns/n-1", POD, 3.5, 2.0),
            (2, "ns/n-1", POD, 0.0, 0.0),
        ]


async def test_version_without_revision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once while requests wait, and again after none waited."""
    async with autoscaler() as server, linked(server) as link:
        for concurrency in (1.0, 1.0, 0.0, 0.0, 1.0):
            assert not await link.send((stat(UNKNOWN, concurrency),))
    assert [record.message for record in caplog.records].count("a version is asked for that has no Revision") == 2


async def test_many_stats_are_split_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message stays below the server's limit, and all stats arrive."""
    monkeypatch.setattr(autoscaler_link, "STATS_PER_MESSAGE", 1)

    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 1.0), stat(N, 1.0)))
        await server.until(lambda server_state: [each.message for each in server_state.stats] == [0, 1])


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_only_zero_stats_are_sent_after_an_outage(how: str) -> None:
    """During an outage stats are dropped and reported as not sent. A zero is sent later, unless another stat follows
    it. The new connection is a new session.
    """
    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 2.0), stat(N, 2.0)))
        before = link.session
        assert before is not None
        await server.until(lambda server_state: len(server_state.stats) == 2)
        if how == "killed":
            server.kill()
        else:
            await server.leave()
        await eventually(lambda: not link.is_open)
        assert link.session is None
        assert not await link.send((stat(M, 0.0), stat(N, 0.0)))
        assert not await link.send((stat(N, 1.0, 1),))
        server.is_away = False
        await eventually(lambda: link.is_open)
        assert link.session is not before
        assert await link.send((stat(N, 1.0),))
        await server.until(lambda server_state: len(server_state.stats) == 4)
        assert [(each.connection, each.revision, each.concurrency) for each in server.stats[2:]] == [
            (1, "ns/m-1", 0.0),
            (1, "ns/n-1", 1.0),
        ]


async def test_refused_connection_is_retried() -> None:
    """The pauses grow. Once connected, stats are received."""
    async with autoscaler() as server:
        server.is_away = True
        async with linked(server, waits_open=False) as link:
            for _ in range(3):
                assert not await link.send((stat(M, 1.0),))
                await asyncio.sleep(0.05)
            server.is_away = False
            await eventually(lambda: link.is_open)
            assert await link.send((stat(M, 1.0),))
            await server.until(lambda server_state: len(server_state.stats) == 1)


async def test_connection_without_pong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link sends pings. Without a pong it makes another connection."""
    monkeypatch.setattr(autoscaler_link, "SILENCE_S", 0.3)

    async with autoscaler() as server, linked(server):
        await server.until(lambda server_state: server_state.pings >= 3)
        server.is_mute, before = True, server.connections
        await server.until(lambda server_state: server_state.connections > before)


FLOOD = (stat(M, 1.0),) * 400  # 44 MB with the pod name LONG: more than the sockets buffer
LONG = POD * 10_000


@asynccontextmanager
async def connected_to_silent(port: int) -> AsyncIterator[tuple[AutoscalerLink, asyncio.Task[None], socket.socket]]:
    """Yield a connected link, its task, and its socket, which must be closed at the end."""
    link = AutoscalerLink(f"ws://127.0.0.1:{port}", LONG, ROWS.get)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.is_open)
    assert isinstance(link.session, aiohttp.ClientWebSocketResponse)
    tcp_socket = link.session.get_extra_info("socket")
    yield link, running, tcp_socket
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: tcp_socket.fileno() < 0)


async def test_stalled_autoscaler_blocks_no_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stat that can't be sent in time counts as not sent, and its connection is closed."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.2)

    async with silent_server() as port, connected_to_silent(port) as (link, _, tcp_socket):
        session = link.session
        assert not await link.send(FLOOD)
        assert link.session is not session
        await eventually(lambda: tcp_socket.fileno() < 0)


async def test_cancelled_link_leaves_no_open_connection() -> None:
    """The link is cancelled while a send is blocked."""
    async with silent_server() as port, connected_to_silent(port) as (link, running, _):
        sending = asyncio.create_task(link.send(FLOOD))
        await asyncio.sleep(0)
        running.cancel()
        assert not await sending


def sockets() -> int:
    """Return the number of open sockets of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this listing itself
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.parametrize("loop", [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop, on which an activator runs"),
])  # fmt: skip
def test_nothing_stays_open_on_either_loop(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A server that reads nothing is given up. No socket is left after each reconnect and at the end."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with silent_server() as port:
            before = sockets()
            link = AutoscalerLink(f"ws://127.0.0.1:{port}", LONG, ROWS.get)
            running = asyncio.create_task(link.run())
            for times in range(1, 3):
                await eventually(lambda: link.is_open)
                assert sockets() == before + 1 + times, "our socket, and the other end of each connection"
                assert not await link.send(FLOOD)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await eventually(lambda: sockets() == before + 2)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    ("timeout_s", "times"),
    [pytest.param(0.2, 1, id="its timeout passes"), pytest.param(30.0, 2, id="it is cancelled again")],
)
async def test_unclosed_peer_leaves_no_open_connection(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, times: int
) -> None:
    """The other end delays a clean close for longer than the timeout."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", timeout_s)
    leaving, really = asyncio.Event(), aiohttp.ClientWebSocketResponse.close

    async def close(socket: aiohttp.ClientWebSocketResponse) -> bool:
        leaving.set()
        return await really(socket)

    async with silent_server() as port, connected_to_silent(port) as (_, running, tcp_socket):
        monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "close", close)
        for _ in range(times):
            running.cancel()
            await leaving.wait()
        await eventually(lambda: tcp_socket.fileno() < 0)


@pytest.mark.parametrize("then", [
    pytest.param((), id="the next connection sends it"),
    pytest.param((stat(N, 2.0),), id="control: not if another stat follows"),
])  # fmt: skip
async def test_undelivered_zero_is_sent_after_reconnect(
    monkeypatch: pytest.MonkeyPatch, then: tuple[ConcurrencyStat, ...]
) -> None:
    """The zero is among many stats that a server which reads nothing did not receive."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(autoscaler_link, "STATS_PER_MESSAGE", 10)  # messages small enough for the server's limit

    async with autoscaler() as server:
        server.is_deaf = True
        link = AutoscalerLink(server.url, LONG, ROWS.get)
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_open)
        assert not await link.send((*FLOOD, stat(N, 0.0)))
        if then:
            assert not await link.send(then)
        assert f"owed={0 if then else 1}" in repr(link)
        server.is_deaf = False
        await eventually(lambda: link.is_open)
        assert await link.send((stat(M, 1.0),))
        sent_zeros = [] if then else [("ns/n-1", 0.0)]
        await server.until(lambda autoscaler: len(autoscaler.stats) == len(sent_zeros) + 1)
        assert [(each.revision, each.concurrency) for each in server.stats] == [*sent_zeros, ("ns/m-1", 1.0)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_lost_autoscaler_host_is_detected() -> None:
    """Keepalive is on, as for every connection to another host."""
    async with silent_server() as port, connected_to_silent(port) as (_, _, tcp_socket):
        assert tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
