"""RequestResponseCycle: how a response is written, and which responses are not sent."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from activator.http.exchange import REQUEST_ID_KEY
from activator.http.request_response_cycle import READ_AHEAD, RequestResponseCycle

OK = b"HTTP/1.1 200 OK\r\n"
CLOSE = b"connection: close\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


class FakeWire:
    """A wire that accepts everything and records the events."""

    def __init__(self) -> None:
        self.is_writing_paused = False
        self.written: list[bytes] = []
        self.said: list[str] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def end(self) -> None:
        self.said.append("end")

    def abort(self) -> None:
        self.said.append("abort")

    def pause_body(self) -> None:
        self.said.append("pause")

    def resume_body(self) -> None:
        if self.said and self.said[-1] == "pause":
            self.said.append("resume")

    async def wait_until_drained(self) -> None:
        self.said.append("drained")
        self.is_writing_paused = False

    def on_response_completed(self) -> None:
        self.said.append("answered")

    def on_task_ended(self) -> None:
        self.said.append("left")


def _start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def _body(data: bytes, more_body: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more_body}


def _sends(messages: Iterable[Message]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def _scope(method: str, version: str = "1.1") -> Scope:
    return {"type": "http", "method": method, "http_version": version, REQUEST_ID_KEY: "req_1"}


async def _serve(app: ASGIApp, method: str = "GET", version: str = "1.1", *, keep_alive: bool = True) -> FakeWire:
    wire = FakeWire()
    cycle = RequestResponseCycle(wire, _scope(method, version), keep_alive=keep_alive, expects_continue=False)
    await cycle.run(app)
    return wire


LENGTH = (b"content-length", b"2")


@pytest.mark.parametrize(("method", "messages", "want"), [
    pytest.param("GET", [_start(200, LENGTH), _body(b"hi")], [OK + b"content-length: 2\r\n\r\nhi"],
                 id="a whole answer is one write"),
    pytest.param("GET", [_start(), _body(b"hi", True), _body(b"ho")],
                 [OK + CHUNKED + b"\r\n2\r\nhi\r\n", b"2\r\nho\r\n0\r\n\r\n"], id="without a length it is chunked"),
    pytest.param("GET", [_start(), _body(b"", True), _body(b"")], [OK + CHUNKED + b"\r\n", b"0\r\n\r\n"],
                 id="an empty piece ends nothing, and the head does not wait for the next"),
    pytest.param("HEAD", [_start(200, LENGTH), _body(b"hi")], [OK + b"content-length: 2\r\n\r\n"],
                 id="HEAD has a length and no body"),
    pytest.param("GET", [_start(204), _body(b"")], [b"HTTP/1.1 204 No Content\r\n\r\n"], id="204 has no body"),
    pytest.param("GET", [_start(599), _body(b"")], [b"HTTP/1.1 599 \r\n" + CHUNKED + b"\r\n0\r\n\r\n"],
                 id="a status without a name"),
])  # fmt: skip
async def test_response_is_written_in_few_writes(method: str, messages: list[Message], want: list[bytes]) -> None:
    """The connection stays open."""
    wire = await _serve(_sends(messages), method)
    assert wire.written == want
    assert wire.said == ["answered", "left"]


@pytest.mark.parametrize(("messages", "want", "said"), [
    pytest.param([_start(), _body(b"hi", True), _body(b"ho")], [OK + CLOSE + b"\r\nhi", b"ho"],
                 ["end", "answered", "left"], id="the body ends with its connection"),
    pytest.param([_start(), _body(b"hi", True)], [OK + CLOSE + b"\r\nhi"], ["abort", "left"],
                 id="an incomplete body aborts the connection"),
    pytest.param([_start(200, LENGTH), _body(b"hi")], [OK + b"content-length: 2\r\n" + CLOSE + b"\r\nhi"],
                 ["end", "answered", "left"], id="a length works as in HTTP/1.1"),
])  # fmt: skip
async def test_http_1_0_response_has_no_chunks(messages: list[Message], want: list[bytes], said: list[str]) -> None:
    """HTTP/1.0 does not know chunks (RFC 9112, 6.1)."""
    wire = await _serve(_sends(messages), version="1.0", keep_alive=False)
    assert (wire.written, wire.said) == (want, said)


async def test_connection_close_is_sent_once() -> None:
    """The header appears once, whether the application or the connection asked for it."""
    for wire in (
        await _serve(_sends([_start(200, LENGTH), _body(b"hi")]), keep_alive=False),
        await _serve(_sends([_start(200, (b"connection", b"close"), LENGTH), _body(b"hi")])),
        await _serve(_sends([_start(200, (b"connection", b"close"), LENGTH), _body(b"hi")]), keep_alive=False),
    ):
        assert wire.written[0].count(b"connection: close\r\n") == 1
        assert wire.said == ["end", "answered", "left"]


@pytest.mark.parametrize(("messages", "begins"), [
    pytest.param([_start(200, (b"x", b"a\r\nset-cookie: b")), _body(b"")], b"HTTP/1.1 500 ",
                 id="a header with CR LF in it"),
    pytest.param([_start(200, (b"x", b"a\nb")), _body(b"")], b"HTTP/1.1 500 ", id="a header with LF in it"),
    pytest.param([_start(200, (b"x", b"a\rb")), _body(b"")], b"HTTP/1.1 500 ", id="a header with CR in it"),
    pytest.param([_start(200, LENGTH), _body(b"hi", True), _body(b"ho")], OK, id="more bytes than the length"),
    pytest.param([_start(200, LENGTH), _body(b"h", True), _body(b"")], OK, id="fewer bytes than the length"),
    pytest.param([_start(200, LENGTH), _body(b"h", True)], OK, id="an answer without an end"),
    pytest.param([_start(200, LENGTH)], b"HTTP/1.1 500 ", id="a head without a body"),
    pytest.param([], b"HTTP/1.1 500 ", id="no answer"),
])  # fmt: skip
async def test_application_failure_ends_the_connection(messages: list[Message], begins: bytes) -> None:
    """If nothing was sent, the client gets 500. Otherwise the connection is cut, so half an answer is not taken for a
    whole one.
    """
    wire = await _serve(_sends(messages))
    assert wire.written[0].startswith(begins)
    assert begins == OK or b"\r\nx-request-id: req_1\r\n" in wire.written[0]
    assert b"set-cookie" not in b"".join(wire.written)
    assert wire.said == ["end", "left"]


def _posted(*, expects_continue: bool = False) -> tuple[RequestResponseCycle, FakeWire]:
    wire = FakeWire()
    return RequestResponseCycle(wire, _scope("POST"), keep_alive=True, expects_continue=expects_continue), wire


async def test_a_body_is_received_as_it_comes() -> None:
    """All received bytes are delivered at once, and the end once. After that only a disconnect follows."""
    cycle, wire = _posted()
    cycle.add_body(b"a")
    cycle.add_body(b"b")
    assert await cycle.receive() == {"type": "http.request", "body": b"ab", "more_body": True}
    waiting = asyncio.create_task(cycle.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    cycle.mark_body_complete()
    assert await waiting == {"type": "http.request", "body": b"", "more_body": False}
    waiting = asyncio.create_task(cycle.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    cycle.mark_disconnected()
    assert await waiting == {"type": "http.disconnect"}
    await cycle.send(_start())
    assert not wire.written, "the client has gone"
    assert wire.said == []


async def test_unread_body_pauses_reading() -> None:
    """Reading pauses at READ_AHEAD bytes, and resumes once the body is taken."""
    cycle, wire = _posted()
    cycle.add_body(b"x" * READ_AHEAD)
    assert wire.said == []
    cycle.add_body(b"x")
    assert wire.said == ["pause"]
    assert len((await cycle.receive())["body"]) == READ_AHEAD + 1
    assert wire.said == ["pause", "resume"]


async def test_100_continue_is_sent_once_when_the_body_is_wanted() -> None:
    """100 Continue is sent once, when the body is first wanted. A response instead of it is final."""
    cycle, wire = _posted(expects_continue=True)
    cycle.add_body(b"a")
    await cycle.receive()
    cycle.mark_body_complete()
    await cycle.receive()
    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    cycle, wire = _posted(expects_continue=True)
    await cycle.send(_start(403))
    await cycle.send(_body(b""))
    assert (await cycle.receive())["type"] == "http.disconnect"
    assert b"100 Continue" not in b"".join(wire.written)


async def test_full_connection_delays_the_next_write() -> None:
    """The cycle waits until the connection has drained."""
    cycle, wire = _posted()
    await cycle.send(_start())
    await cycle.send(_body(b"a", True))
    wire.is_writing_paused = True
    await cycle.send(_body(b"b"))
    assert wire.said == ["drained", "answered"]


@pytest.mark.parametrize(("parts", "ended", "expects_continue", "is_gone", "want"), [
    pytest.param([b"a"], True, False, False, b"a", id="a complete body"),
    pytest.param([b"a" * READ_AHEAD, b"b"], True, False, False, b"a" * READ_AHEAD + b"b", id="a body in parts"),
    pytest.param([], True, False, False, b"", id="an empty body"),
    pytest.param([b"a"], False, False, False, None, id="an incomplete body"),
    pytest.param([b"a"], True, True, False, None, id="a client that expects 100"),
    pytest.param([b"a"], True, False, True, None, id="a client that has gone"),
])  # fmt: skip
def test_complete_body_is_returned_at_once(
    parts: list[bytes], ended: bool, expects_continue: bool, is_gone: bool, want: bytes | None
) -> None:
    """The body is returned once, and a paused socket is read again. An incomplete body is not returned."""
    cycle, wire = _posted(expects_continue=expects_continue)
    for part in parts:
        cycle.add_body(part)
    if ended:
        cycle.mark_body_complete()
    if is_gone:
        cycle.mark_disconnected()
    assert cycle.try_read_body() == want
    assert want is None or cycle.try_read_body() is None
    assert wire.said == (["pause", "resume"] if len(parts) == 2 else [])
