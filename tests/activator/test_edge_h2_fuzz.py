"""Whatever frames come: a connection serves them or ends, nothing is raised, and nothing is left of it."""

import asyncio
import random
from collections import Counter

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ResponseReceived
from hpack import Encoder
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from starlette.types import Receive, Scope, Send

from activator.edge_connection import EXTENSION
from activator.edge_cycle import READ_AHEAD
from activator.edge_frames import PREFACE
from activator.exchange import NAMED
from tests.activator.memory_edge import MemoryServer

CONNECTIONS = 2000


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Some of the body is read, some of the answers are broken off."""
    chance = random.Random(scope["raw_path"])
    if chance.random() < 0.5:
        await receive()
    headers = [(b"content-length", b"20")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
    if chance.random() < 0.3:
        scope["extensions"][EXTENSION].abort()
    await send({"type": "http.response.body", "body": b"x" * 10, "more_body": False})


def _head(chance: random.Random) -> bytes:
    method, path = chance.choice(("GET", "POST", "HEAD", "CONNECT", "")), chance.choice(("/a", "/b?x", "*", "", "/é"))
    if chance.random() < 0.7:
        method, path = "POST", f"/{chance.randrange(99)}"
    head = [(":method", method), (":scheme", "https"), (":authority", "a"), (":path", path)]
    for _ in range(chance.randrange(3)):
        name = chance.choice(("x", "content-length", "expect", "te", "host", "X", ":y", "cookie"))
        head.append((name, chance.choice(("1", "0", "a", "100-continue", "+1", "trailers"))))
    return bytes(Encoder().encode(head))


def _frame(chance: random.Random) -> bytes:
    stream = chance.choice((0, 1, 1, 3, 3, 5, 7, 2))
    flags = [name for name in ("END_STREAM", "END_HEADERS") if chance.random() < 0.8]
    ends = [name for name in flags if name == "END_STREAM"]
    makers: list[Frame] = []
    try:
        match chance.randrange(11):
            case 0 | 1 | 2:
                makers.append(HeadersFrame(stream, _head(chance), flags=flags))
            case 3 | 4:
                makers.append(DataFrame(stream, b"x" * chance.choice((0, 1, 1000, 16_000)), flags=ends))
            case 5:
                makers.append(RstStreamFrame(stream, chance.randrange(20)))
            case 6:
                value = chance.choice((0, 1, 4096, 65_536, (1 << 31) - 1))
                makers.append(SettingsFrame(0, settings={chance.randrange(1, 9): value}))
            case 7:
                makers.append(WindowUpdateFrame(stream, chance.choice((1, 1000, (1 << 31) - 1))))
            case 8:
                makers.append(PingFrame(0, b"12345678"))
            case 9:
                makers.append(GoAwayFrame(0))
            case _:
                makers.append(ContinuationFrame(stream, _head(chance), flags=flags[1:]))
    except HyperframeError:
        return b""
    raw = bytearray(makers[0].serialize())
    if chance.random() < 0.03:
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(raw)


async def _waits(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes nothing of the body."""
    await asyncio.Event().wait()


async def _fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError(scope[NAMED])


def test_an_application_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """500, with the name that the application knew the request by."""

    async def scenario() -> None:
        server = MemoryServer(_fails)
        here, socket = server.http2()
        client = H2Connection(H2Configuration(header_encoding="utf-8"))
        client.initiate_connection()
        head = [(":method", "GET"), (":scheme", "https"), (":authority", "a"), (":path", "/a")]
        client.send_headers(1, head, end_stream=True)
        here.data_received(client.data_to_send())
        await server.tasks_end()
        (answer,) = [event for event in client.receive_data(socket.written) if isinstance(event, ResponseReceived)]
        (record,) = caplog.records
        assert record.exc_info is not None
        assert {(":status", "500"), ("x-request-id", str(record.exc_info[1]))} <= set(answer.headers or [])
        here.connection_lost(None)

    asyncio.run(scenario())


@pytest.mark.parametrize("beyond", [True, False], ids=["beyond it", "as much as may be: the control"])
def test_a_body_beyond_its_window(beyond: bool) -> None:
    """Nobody has taken anything of it: the connection ends with FLOW_CONTROL_ERROR."""

    async def scenario() -> None:
        server = MemoryServer(_waits)
        here, socket = server.http2()
        head = [(":method", "POST"), (":scheme", "https"), (":authority", "a"), (":path", "/a")]
        frames = READ_AHEAD // 16_000 + beyond
        body = DataFrame(1, b"x" * 16_000).serialize() * frames
        here.data_received(PREFACE + HeadersFrame(1, Encoder().encode(head), flags=("END_HEADERS",)).serialize() + body)
        assert socket.closing is beyond
        goodbye = GoAwayFrame(0, 1, ErrorCodes.FLOW_CONTROL_ERROR).serialize()
        assert socket.written.endswith(goodbye) is beyond
        here.connection_lost(None)
        for task in server.state.tasks:
            task.cancel()
        await asyncio.wait(server.state.tasks)

    asyncio.run(scenario())


def test_any_frames(caplog: pytest.LogCaptureFixture) -> None:
    """2,000 connections of chance, each from its number, read in pieces of any size."""

    async def scenario() -> None:
        server = MemoryServer(_answer)
        came: Counter[str] = Counter()
        for number in range(CONNECTIONS):
            chance = random.Random(number)
            here, socket = server.http2()
            data = PREFACE + b"".join(_frame(chance) for _ in range(chance.randrange(1, 8)))
            while data:
                size = chance.choice((1, 10, 100, len(data)))
                here.data_received(data[:size])
                data = data[size:]
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            came["ended" if socket.closing else "serves"] += 1
            here.connection_lost(None)
            async with asyncio.timeout(30):
                await server.tasks_end()
            assert "streams=0 <Outgoing waiting=0 ready=0>" in repr(here), number
            assert not server.state.connections
        assert min(came["ended"], came["serves"]) > CONNECTIONS // 20, came
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    asyncio.run(scenario())
