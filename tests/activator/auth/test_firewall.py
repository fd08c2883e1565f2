"""An operator's firewall behind a real socket: what it receives, what its verdict does, and its absence."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.activator.control import KEY
from tests.activator.world import ActivatorWorld, ReceivedResponse, http, world
from tests.eventually import eventually

PATIENT = 10_000  # ms: longer than any busy machine takes
SECRET = "sesame-open-4711"


def said(body: bytes, status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    """Return an HTTP response."""
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: %d\r\n" % len(body) + extra + b"\r\n" + body


ALLOW, REFUSE = said(b'{"verdict":"allow"}'), said(b'{"verdict":"refuse"}')
Script = Callable[[dict[str, Any]], bytes | None]  # None: never answer


class FakeFirewall:
    """Read questions on each connection, one after another, and answer with the bytes of the script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.questions: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()

    def hang_up(self) -> None:
        """Close every connection."""
        for writer in self.writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                body = await reader.readexactly(length)
                self.raw.append(head + body)
                self.questions.append(json.loads(body))
                if (answer := self.script(self.questions[-1])) is None:
                    await reader.read()
                    return
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


@asynccontextmanager
async def guarded(
    tmp_path: Path, script: Script, **settings: object
) -> AsyncIterator[tuple[ActivatorWorld, FakeFirewall]]:
    """Start an activator with a firewall and a replica."""
    wall = FakeFirewall(script)
    path = tmp_path / "waf.sock"
    server = await asyncio.start_unix_server(wall.serve, path)
    try:
        given: dict[str, Any] = {"waf_ms": PATIENT, **settings}
        async with world(tmp_path, waf_socket=path, **given) as here:
            await here.replica("a")
            wall.questions.clear()
            wall.raw.clear()
            yield here, wall
    finally:
        server.close()


async def test_firewall_receives_only_names_and_sizes(tmp_path: Path) -> None:
    """The firewall is asked before the key is checked. It gets no header value, query or body byte."""
    async with guarded(tmp_path, lambda _: ALLOW) as (here, wall):
        body = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
        got = await here.post(f"/v1/chat/completions?x={SECRET}", body, X_Mine=SECRET)
        assert got.status == 200
        bad = await here.post("/v1/chat/completions", key=f"kv-nobodynobody-{SECRET}")
        assert bad.status == 401
        first, second = wall.questions
        assert (first["method"], first["path"], first["address"]) == ("POST", "/v1/chat/completions", "127.0.0.1")
        assert first["request_id"] == got.headers["x-request-id"]
        assert first.keys() == {"request_id", "method", "path", "address", "headers"}
        sizes = dict(first["headers"])
        assert (sizes["x-mine"], sizes["authorization"]) == (len(SECRET), len(f"Bearer {KEY}"))
        assert dict(second["headers"])["authorization"] == len(f"Bearer kv-nobodynobody-{SECRET}")
        assert [raw for raw in wall.raw if SECRET.encode() in raw or KEY.encode() in raw] == []
        assert SECRET.encode() in json.dumps(body).encode(), "the control: it would be found"


async def test_firewall_verdict_is_applied(tmp_path: Path) -> None:
    """An allowed request is served as usual. A refused one gets 403 in the format of its path, whatever its key."""

    def script(question: dict[str, Any]) -> bytes:
        return REFUSE if dict(question["headers"]).get("x-bad") else ALLOW

    async with guarded(tmp_path, script) as (here, wall):
        assert (await here.post()).status == 200
        got = await here.post(X_Bad="1")
        assert (got.status, got.code) == (403, "firewall_refused")
        assert got.headers["x-request-id"] == wall.questions[-1]["request_id"]
        nobody = await here.post(key="no key at all", X_Bad="1")
        assert (nobody.status, nobody.code) == (403, "firewall_refused")
        inner = await here.get("/admin/v1/models", X_Bad="1")
        assert (inner.status, inner.json["code"]) == (403, "firewall_refused")
        for _ in range(8):
            assert (await here.post()).status == 200
        assert wall.connections == 1, "the connection is reused"
        assert await here.metric_value("kelvin_firewall_total", verdict="refuse") == 3
        assert await here.metric_value("kelvin_firewall_total", verdict="allow") >= 9
        assert await here.metric_value("kelvin_refusals_total", outcome="firewall_refused", status="403") == 3


async def test_refusal_has_the_request_id_the_firewall_saw(tmp_path: Path) -> None:
    """Also the edge's refusal of an incomplete body has that id, so the firewall's log can be searched by it."""
    async with guarded(tmp_path, lambda _: ALLOW, head_s=0.3) as (here, wall):
        reader, writer = await here.raw(http(b"x" * 100)[:-50])
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.transport.abort()
        assert head.startswith(b"HTTP/1.1 504")
        name = wall.questions[-1]["request_id"]
        assert f"\r\nx-request-id: {name}\r\n".encode() in head
        assert json.loads(body)["error"]["request_id"] == name


GARBAGE = {
    "no JSON": said(b"sure"),
    "another word": said(b'{"verdict":"perhaps"}'),
    "a field more": said(b'{"verdict":"allow","because":1}'),
    "nothing": said(b""),
    "another status": said(b'{"verdict":"allow"}', b"201 Created"),
    "a redirect": said(b'{"verdict":"allow"}', b"302 Found", b"location: http://firewall/v1/other\r\n"),
    "too much": said(b'{"verdict":"allow"}' + b" " * 5000),
    "no HTTP": b"verdict: allow\r\n\r\n",
}


@pytest.mark.parametrize(("unanswered", "status"), [("refuse", 503), ("allow", 200)])
async def test_missing_verdict_follows_the_setting(tmp_path: Path, unanswered: str, status: int) -> None:
    """An invalid answer, or a connection that ends without one, follows KELVIN_WAF_UNANSWERED and is counted."""
    answers = [*GARBAGE.values()]

    def check(got: ReceivedResponse) -> None:
        assert got.status == status
        assert status == 200 or got.code == "unavailable"

    async with guarded(tmp_path, lambda _: ALLOW, waf_unanswered=unanswered) as (here, wall):
        before = await here.metric_value("kelvin_firewall_total", verdict="garbage")
        wall.script = lambda _: answers.pop(0)
        for _ in range(len(GARBAGE)):
            check(await here.post())
        assert answers == []
        assert await here.metric_value("kelvin_firewall_total", verdict="garbage") - before == len(GARBAGE)
        wall.script = lambda _: ALLOW
        assert (await here.post()).status == 200, "it is asked again, as before"


@pytest.mark.parametrize(("unanswered", "status"), [("refuse", 503), ("allow", 200)])
async def test_silent_firewall_times_out(tmp_path: Path, unanswered: str, status: int) -> None:
    """The request waits for KELVIN_WAF_MS only."""
    wall = FakeFirewall(lambda _: None)
    path = tmp_path / "silent.sock"
    server = await asyncio.start_unix_server(wall.serve, path)
    async with world(tmp_path, waf_socket=path, waf_unanswered=unanswered, waf_ms=50) as here:
        got = await here.get("/v1/models")
        assert got.status == status
        assert status == 200 or got.code == "unavailable"
        assert await here.metric_value("kelvin_firewall_total", verdict="late") == 1
        assert len(wall.questions) == 1
    server.close()


async def test_firewall_outage_ends_when_it_returns(tmp_path: Path) -> None:
    """Requests are refused at once while nothing listens, and served again once a firewall does."""
    path = tmp_path / "waf.sock"
    async with world(tmp_path, waf_socket=path, waf_ms=PATIENT) as here:
        got = await here.get("/v1/models")
        assert (got.status, got.code) == (503, "unavailable")
        assert await here.metric_value("kelvin_firewall_total", verdict="away") == 1
        for _ in range(2):
            wall = FakeFirewall(lambda _: ALLOW)
            server = await asyncio.start_unix_server(wall.serve, path)
            assert (await here.get("/v1/models")).status == 200
            server.close()
            path.unlink()
            wall.hang_up()
            assert (await here.get("/v1/models")).status == 503


async def test_a_caller_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    """The connection to the firewall is closed when the client disconnects."""
    left = asyncio.Event()
    wall = FakeFirewall(lambda _: None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wall.serve(reader, writer)
        left.set()

    path = tmp_path / "waf.sock"
    server = await asyncio.start_unix_server(serve, path)
    async with world(tmp_path, waf_socket=path, waf_ms=PATIENT) as here:
        _, writer = await here.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(30):
            await eventually(lambda: wall.questions)
            writer.transport.abort()
            await left.wait()
    server.close()
