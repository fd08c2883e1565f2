"""The connection to Knative's autoscaler, over a real WebSocket: what comes, when nothing does, and after it broke."""

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
    """One that knows the revisions; in the end it was sent nothing wrong."""
    server = StrictAutoscaler(*(f"{row.namespace}/{row.name}" for row in ROWS.values()))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
    assert server.wrong == []


@asynccontextmanager
async def linked(server: StrictAutoscaler, *, told: bool = True) -> AsyncIterator[AutoscalerLink]:
    """A link to it, which runs, and has connected if `told`."""
    link = AutoscalerLink(server.url, POD, ROWS.get)
    running = asyncio.create_task(link.run())
    try:
        if told:
            await eventually(lambda: link.is_open)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert link.session is None


@asynccontextmanager
async def deaf() -> AsyncIterator[int]:
    """A port at which WebSockets are opened, and nothing is read of them."""
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
    """Several revisions in one message; of a version that has none, that nobody was told."""
    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 1.0, 1),))
        assert await link.send((stat(M, 0.25), stat(N, 3.5, 2)))
        assert not await link.send((stat(UNKNOWN, 1.0),))
        assert not await link.send((stat(UNKNOWN, 1.0), stat(N, 0.0)))
        await server.until(lambda heard: len(heard.stats) == 4)
        assert [each[1:] for each in server.stats] == [
            (0, "ns/m-1", POD, 1.0, 1.0),
            (1, "ns/m-1", POD, 0.25, 0.0),
            (1, "ns/n-1", POD, 3.5, 2.0),
            (2, "ns/n-1", POD, 0.0, 0.0),
        ]


async def test_version_without_revision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is told of while somebody waits; again after nobody did."""
    async with autoscaler() as server, linked(server) as link:
        for concurrency in (1.0, 1.0, 0.0, 0.0, 1.0):
            assert not await link.send((stat(UNKNOWN, concurrency),))
    assert [record.message for record in caplog.records].count("a version is asked for that has no Revision") == 2


async def test_many_stats_are_split_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no message is too long to be taken; all of it comes."""
    monkeypatch.setattr(autoscaler_link, "AT_ONCE", 1)

    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 1.0), stat(N, 1.0)))
        await server.until(lambda heard: [each.message for each in heard.stats] == [0, 1])


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_only_zero_stats_are_sent_after_an_outage(how: str) -> None:
    """While it is away a figure is dropped, and said to be; a zero is owed, unless something came after it. Then it is
    connected to again, in a session of its own.
    """
    async with autoscaler() as server, linked(server) as link:
        assert await link.send((stat(M, 2.0), stat(N, 2.0)))
        before = link.session
        assert before is not None
        await server.until(lambda heard: len(heard.stats) == 2)
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
        await server.until(lambda heard: len(heard.stats) == 4)
        assert [(each.connection, each.revision, each.concurrency) for each in server.stats[2:]] == [
            (1, "ns/m-1", 0.0),
            (1, "ns/n-1", 1.0),
        ]


async def test_refused_connection_is_retried() -> None:
    """Later and later; from the moment on in which it is let in it is heard."""
    async with autoscaler() as server:
        server.is_away = True
        async with linked(server, told=False) as link:
            for _ in range(3):
                assert not await link.send((stat(M, 1.0),))
                await asyncio.sleep(0.05)
            server.is_away = False
            await eventually(lambda: link.is_open)
            assert await link.send((stat(M, 1.0),))
            await server.until(lambda heard: len(heard.stats) == 1)


async def test_connection_without_pong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the socket says: it is asked whether it lives, and another connection is made where it does not."""
    monkeypatch.setattr(autoscaler_link, "SILENCE_S", 0.3)

    async with autoscaler() as server, linked(server):
        await server.until(lambda heard: heard.pings >= 3)
        server.is_mute, before = True, server.connections
        await server.until(lambda heard: heard.connections > before)


FLOOD = (stat(M, 1.0),) * 400  # 44 MB where the pod's name is LONG: more than sockets hold
LONG = POD * 10_000


@asynccontextmanager
async def unheard(port: int) -> AsyncIterator[tuple[AutoscalerLink, asyncio.Task[None], socket.socket]]:
    """A link to it that has connected, what runs it, and what it is connected by, which is closed in the end."""
    link = AutoscalerLink(f"ws://127.0.0.1:{port}", LONG, ROWS.get)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.is_open)
    assert isinstance(link.session, aiohttp.ClientWebSocketResponse)
    line = link.session.get_extra_info("socket")
    yield link, running, line
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: line.fileno() < 0)


async def test_stalled_autoscaler_blocks_no_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be sent within its time was not taken, and the connection is given up: what it holds is let go."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.2)

    async with deaf() as port, unheard(port) as (link, _, line):
        session = link.session
        assert not await link.send(FLOOD)
        assert link.session is not session
        await eventually(lambda: line.fileno() < 0)


async def test_cancelled_link_leaves_no_open_connection() -> None:
    """While more is to be sent than is taken."""
    async with deaf() as port, unheard(port) as (link, running, _):
        sending = asyncio.create_task(link.send(FLOOD))
        await asyncio.sleep(0)
        running.cancel()
        assert not await sending


def sockets() -> int:
    """That this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one by which this was listed
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.parametrize("loop", [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop, on which an activator runs"),
])  # fmt: skip
def test_nothing_stays_open_on_either_loop(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Of one that reads nothing, once it is given up: each time that it is connected to again, and in the end."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with deaf() as port:
            before = sockets()
            link = AutoscalerLink(f"ws://127.0.0.1:{port}", LONG, ROWS.get)
            running = asyncio.create_task(link.run())
            for times in range(1, 3):
                await eventually(lambda: link.is_open)
                assert sockets() == before + 1 + times, "ours, and the other end of each that there was"
                assert not await link.send(FLOOD)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await eventually(lambda: sockets() == before + 2)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    ("timeout_s", "times"),
    [pytest.param(0.2, 1, id="its time is over"), pytest.param(30.0, 2, id="it is cancelled again")],
)
async def test_unclosed_peer_leaves_no_open_connection(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, times: int
) -> None:
    """The other end keeps up a close in order, for longer than there is time."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", timeout_s)
    leaving, really = asyncio.Event(), aiohttp.ClientWebSocketResponse.close

    async def close(socket: aiohttp.ClientWebSocketResponse) -> bool:
        leaving.set()
        return await really(socket)

    async with deaf() as port, unheard(port) as (_, running, line):
        monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "close", close)
        for _ in range(times):
            running.cancel()
            await leaving.wait()
        await eventually(lambda: line.fileno() < 0)


@pytest.mark.parametrize("then", [
    pytest.param((), id="and is heard by the next connection"),
    pytest.param((stat(N, 2.0),), id="unless something comes after it: the control"),
])  # fmt: skip
async def test_undelivered_zero_is_sent_after_reconnect(
    monkeypatch: pytest.MonkeyPatch, then: tuple[ConcurrencyStat, ...]
) -> None:
    """Among much else, by one that reads nothing and is left."""
    monkeypatch.setattr(autoscaler_link, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(autoscaler_link, "AT_ONCE", 10)  # in messages that the server's bound lets in

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
        heard = [] if then else [("ns/n-1", 0.0)]
        await server.until(lambda heard_by: len(heard_by.stats) == len(heard) + 1)
        assert [(each.revision, each.concurrency) for each in server.stats] == [*heard, ("ns/m-1", 1.0)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_lost_autoscaler_host_is_detected() -> None:
    """The connection is made as each to another host."""
    async with deaf() as port, unheard(port) as (_, _, line):
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
