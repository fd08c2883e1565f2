"""Request framing: a body is never read as the next request, whatever its head says and however reads cut it."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from tests.activator.http.memory_connections import MemoryConnection, MemoryServer
from tests.virtual_loop import run_virtually

HOST = b"Host: localhost\r\n"
POST = b"POST /x HTTP/1.1\r\n" + HOST
SECOND = b"GET /second HTTP/1.1\r\n" + HOST + b"\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(SECOND)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(SECOND), SECOND)

UPGRADE = b"Connection: upgrade\r\nUpgrade: x\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WEBSOCKET = b"Connection: keep-alive\r\nUpgrade: websocket\r\nConnection: UPGRADE\r\nUpgrade: y\r\n"
EXPECT = b"Expect: 100-continue\r\n"

# Each has a body that is itself a request.
DELIVERED = {
    "no upgrade": POST + LENGTH + b"\r\n" + SECOND,
    "an unknown upgrade": POST + UPGRADE + LENGTH + b"\r\n" + SECOND,
    "an upgrade to h2c": POST + H2C + LENGTH + b"\r\n" + SECOND,
    "an upgrade to websocket, in several headers": POST + WEBSOCKET + LENGTH + b"\r\n" + SECOND,
    "an upgrade with chunks": POST + UPGRADE + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
    "an upgrade with Expect": POST + EXPECT + UPGRADE + LENGTH + b"\r\n" + SECOND,
    "a length in the trailers": POST + CHUNKED + b"\r\n" + CHUNKS + b"Content-Length: 5\r\n\r\n",
    "a coding in the trailers": POST + CHUNKED + b"\r\n" + CHUNKS + CHUNKED + b"\r\n",
    "another coding in the trailers": POST + CHUNKED + b"\r\n" + CHUNKS + b"Transfer-Encoding: gzip\r\n\r\n",
    "an upgrade in the trailers": POST + CHUNKED + b"\r\n" + CHUNKS + UPGRADE + b"\r\n",
    "a host and a key in the trailers": POST + CHUNKED + b"\r\n" + CHUNKS + b"Host: b\r\nAuthorization: x\r\n\r\n",
    "a chunk extension": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b';a="b"\r\n', 1) + b"\r\n",
}

# None of these reaches the application.
REFUSED = {
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS + b"\r\n",
    "gzip and chunked in two headers": POST + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
    "chunked behind a comma": POST + b"Transfer-Encoding: ,chunked\r\n\r\n" + CHUNKS + b"\r\n",
    "chunked before a tab": POST + b"Transfer-Encoding: chunked\t\r\n\r\n" + CHUNKS + b"\r\n",
    "chunked, then identity": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS + b"\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + SECOND,
    "identity and a length": POST + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + SECOND,
    "an empty coding": POST + b"Transfer-Encoding: \r\n\r\n" + SECOND,
    "chunks and a length": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS + b"\r\n",
    "a length and chunks": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
    "chunks and a length, with an upgrade": POST + UPGRADE + CHUNKED + LENGTH + b"\r\n" + CHUNKS + b"\r\n",
    "two lengths, with an upgrade": POST + UPGRADE + b"Content-Length: 1\r\n" + LENGTH + b"\r\n" + SECOND,
    "chunks in HTTP/1.0": b"POST /x HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
    "a length in Arabic digits": POST + "Content-Length: \u0663\r\n\r\nabc".encode(),
    "HTTP/2.0": b"GET /x HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /x HTTP/0.9\r\n" + HOST + b"\r\n",
    "HTTP/1.2": b"GET /x HTTP/1.2\r\n" + HOST + b"\r\n",
    "no version": b"GET /x\r\n" + HOST + b"\r\n",
    "RTSP": b"GET /x RTSP/1.0\r\n" + HOST + b"\r\n",
    "ICE": b"SOURCE /x ICE/1.0\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a carriage return before the method": b"\rGET /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a fragment": b"GET /x#y HTTP/1.1\r\n" + HOST + b"\r\n",
    "another scheme": b"GET ftp://localhost/x HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT with a path and a body": b"CONNECT /x HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + SECOND,
    "CONNECT with a URL": b"CONNECT http://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n" + SECOND,
    "CONNECT with an authority": b"CONNECT localhost HTTP/1.1\r\n" + HOST + b"\r\n" + SECOND,
}

CUTS = {"in one read": 1 << 20, "byte by byte": 1, "in sevens": 7}


async def _feed(raw: bytes, size: int, behind: bytes = b"") -> MemoryConnection:
    edge = MemoryConnection()
    for start in range(0, len(raw), size):
        await edge.feed(raw[start : start + size])
    await edge.feed(behind)
    await edge.close()
    return edge


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("raw", DELIVERED.values(), ids=DELIVERED.keys())
def test_body_is_delivered_as_one_request(raw: bytes, size: int) -> None:
    """One request is delivered with its whole body, and one answer is written."""
    edge = run_virtually(_feed(raw, size))
    (only,) = edge.delivered
    assert (only.method, only.target, only.body, only.is_complete) == ("POST", b"/x", SECOND, True)
    assert edge.socket.written.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("raw", DELIVERED.values(), ids=DELIVERED.keys())
def test_next_request_starts_after_the_body(raw: bytes, size: int) -> None:
    """The connection goes on: the next request is the one that was sent after the body."""
    edge = run_virtually(_feed(raw, size, b"GET /third HTTP/1.1\r\n" + HOST + b"\r\n"))
    assert [each.target for each in edge.delivered] == [b"/x", b"/third"]


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_head_is_refused(raw: bytes, size: int) -> None:
    """The status is 400, the connection ends, and the application receives nothing."""
    edge = run_virtually(_feed(raw, size))
    assert edge.delivered == []
    assert edge.socket.written.startswith(b"HTTP/1.1 400")
    assert edge.socket.closing


@pytest.mark.parametrize("answers_early", [False, True])
async def test_close_in_a_trailer_ends_the_connection(answers_early: bool) -> None:
    """The parser ignores all bytes after such a trailer, so a client on an open connection would wait for ever."""
    edge = MemoryConnection(answers_early=answers_early)
    await edge.feed(POST + CHUNKED + b"\r\n3\r\nabc\r\n")
    await edge.feed(b"0\r\nConnection: close\r\n\r\n")
    await edge.close()
    assert edge.socket.written.count(b"HTTP/1.1 200") == 1
    assert edge.socket.closing


async def test_request_in_the_read_of_an_answered_body_is_not_served() -> None:
    """An application may answer before the body has ended. A request pipelined behind that body is not served."""
    edge = MemoryConnection(answers_early=True)
    await edge.feed(POST + b"Content-Length: 3\r\n\r\na")
    await edge.feed(b"bc" + SECOND)
    await edge.close()
    assert [each.target for each in edge.delivered] == [b"/x"]
    assert edge.socket.closing


@pytest.mark.parametrize(
    "behind", [pytest.param(b"\r\n", id="one empty line"), pytest.param(b"\r\n" * 20_000, id="a flood of empty lines")]
)
def test_empty_lines_behind_a_request_do_not_cut_its_answer(behind: bytes) -> None:
    """Some clients send an empty line after a body (RFC 9112, 2.2). The limits of a head don't apply to it."""

    async def ticks(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"tick", "more_body": True})
            await asyncio.sleep(1)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario() -> tuple[bool, bytes]:
        server = MemoryServer(ticks)
        connection, socket = server.http1()
        connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
        await asyncio.sleep(1)
        connection.data_received(behind)
        await asyncio.sleep(30)
        was_closing = socket.closing
        connection.connection_lost(None)
        await server.run_tasks_to_end()
        return was_closing, socket.written

    was_closing, written = run_virtually(scenario())
    assert not was_closing
    assert written.count(b"tick") == 20
    assert written.count(b"HTTP/1.1") == 1
    assert written.endswith(b"0\r\n\r\n")


async def test_carriage_returns_behind_a_request_are_not_kept() -> None:
    """They are dropped while a request is answered. The next request is parsed without them."""

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    may_end = asyncio.Event()
    server = MemoryServer(waits)
    connection, socket = server.http1()
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    for _ in range(40):
        connection.data_received(b"\r" * 1000)
    assert len(connection._request_line) <= 1000
    may_end.set()
    await server.run_tasks_to_end()
    connection.data_received(POST + b"Content-Length: 2\r\n\r\n{}")
    await server.run_tasks_to_end()
    connection.connection_lost(None)
    assert socket.written.count(b"HTTP/1.1 200") == 2
