"""The edge as designed in docs/design/0001-http-server.md, row by row. Run it before the server's version moves."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from tests.activator.replica import ReceivedRequest, endless, hello
from tests.activator.world import ActivatorWorld, http, world

HOST = b"Host: localhost\r\n"
# A connection that ends after 0.3 s may take this long on a busy machine. The default limit is 5 s or more.
SHORT_S = 4.0


async def _slowly(call: ReceivedRequest) -> None:
    """Answer so late that the bytes behind the request are read first."""
    await asyncio.sleep(0.2)
    await hello(call)


async def _send(here: ActivatorWorld, raw: bytes) -> bytes:
    """Send the bytes. Return everything until the end, or for two seconds after the head."""
    reader, writer = await here.raw(raw)
    got = b""
    try:
        async with asyncio.timeout(30):
            got = await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(2):
            while data := await reader.read(65536):
                got += data
            got += b"<end>"
    except TimeoutError:
        got += b"<open>"
    except asyncio.IncompleteReadError as cut:
        got = cut.partial + b"<end>"
    except (ConnectionError, ssl.SSLError):
        got += b"<reset>"
    writer.transport.abort()
    return got


GET, POST = (
    b"GET /v1/models HTTP/1.1\r\n" + HOST,
    b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n",
)
# In addition to the requests in tests/activator/http/test_abuse.py.
REFUSED = {
    "bare line feeds": (400, GET.replace(b"\r\n", b"\n") + b"\n"),
    "a head of 40 kB": (431, GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n"),
    "a head of 400 kB that never ends": (431, GET + b"X: " + b"a" * 400_000),
    "101 of 100 headers": (431, GET + b"x: a\r\n" * 100 + b"\r\n"),
    "two keys": (400, GET + b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n"),
    "two deadlines": (400, GET + b"X-Kelvin-Deadline-Ms: 5\r\n" * 2 + b"\r\n"),
    "two priorities": (400, GET + b"X-Kelvin-Priority: low\r\nX-Kelvin-Priority: high\r\n\r\n"),
    "a body with a content coding": (400, POST + b"Content-Encoding: gzip\r\n\r\nx"),
    "two content codings": (400, POST + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n\r\nx"),
}


async def test_what_is_malformed_or_too_large_is_refused(tmp_path: Path) -> None:
    """Each gets its status and the connection is closed. Control: a valid request is accepted."""

    async with world(tmp_path) as here:
        for name, (status, raw) in REFUSED.items():
            got = await _send(here, raw)
            assert got.startswith(b"HTTP/1.1 %d" % status), (name, got[:200])
            assert b"\r\nx-request-id: req_" in got, name
            assert got.endswith((b"<end>", b"<reset>")) or b"connection: close" in got, name
        fine = await _send(here, GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n")
        assert fine.startswith(b"HTTP/1.1 401"), fine[:100]
        assert fine.endswith(b"<open>")
        for head in (b"x: a\r\n" * 99, b"", b"Content-Encoding: identity\r\nAccept: a\r\nAccept: b\r\n"):
            target = b"/v1/models" if head else b"http://localhost/v1/models"
            fine = await _send(here, b"GET " + target + b" HTTP/1.1\r\n" + HOST + head + b"\r\n")
            assert fine.startswith(b"HTTP/1.1 401"), fine[:100]
        counted = await here.series("kelvin_refusals_total")
        assert {labels["status"] for labels, _ in counted if labels["outcome"] == "http"} == {"400", "431"}
        assert "Invalid HTTP request" not in (here.data / "log").read_text(), "bad requests don't fill the log"


async def test_trailers_are_not_read_as_headers(tmp_path: Path) -> None:
    """A trailer does not change its request, though the same header in the head does. Chunk extensions are bounded."""

    async with world(tmp_path) as here:
        await here.replica("a")
        body = b'{"model":"m","prompt":"x"}'
        late = b"X-Kelvin-Deadline-Ms: never\r\n"
        chunked = http(b"", "/v1/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        trailed = chunked + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, late)
        padded = chunked + b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(body), b"x" * 400_000, body)
        reader, writer = await here.raw(trailed)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        assert (await _send(here, trailed.replace(b"\r\n\r\n", b"\r\n" + late + b"\r\n", 1))).startswith(
            b"HTTP/1.1 400"
        )
        assert (await _send(here, padded.replace(b"x" * 390_000, b""))).startswith(b"HTTP/1.1 200")
        assert (await _send(here, padded)).startswith(b"HTTP/1.1 400"), "an extension of 400 kB"


async def test_garbage_after_a_request_does_not_change_its_response(tmp_path: Path) -> None:
    """The first request gets its whole response and no other. The connection closes."""

    async with world(tmp_path) as here:
        await here.replica("a", _slowly)
        body = b'{"model":"m","prompt":"x"}'
        for behind in (b"\x00\x01\x02", b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000):
            got = await _send(here, http(body, "/v1/completions") + behind)
            assert got.startswith(b"HTTP/1.1 200"), got[:80]
            assert got.count(b"HTTP/1.1") == 1
            assert got.endswith(b"<end>")


async def test_the_certificate_is_chosen_by_name(tmp_path: Path) -> None:
    """MODEL.TENANT.DOMAIN gets the tenant's certificate. Other names get the default, which is valid for localhost."""

    def names(tls: ssl.SSLObject) -> set[str]:
        certificate = tls.getpeercert()
        assert certificate is not None
        return {str(pair[1]) for pair in certificate["subjectAltName"]}

    async def shown(here: ActivatorWorld, name: str) -> set[str]:
        lax = ssl.create_default_context(cafile=str(here.data / "ca.pem"))
        lax.check_hostname = False
        _, writer = await asyncio.open_connection("127.0.0.1", here.port, ssl=lax, server_hostname=name)
        found = names(writer.get_extra_info("ssl_object"))
        writer.transport.abort()
        return found

    async with world(tmp_path) as here:
        default = {"localhost", "127.0.0.1", "0:0:0:0:0:0:0:1"}
        async with asyncio.timeout(30):  # leaves are made in the background
            while await shown(here, "m.default.kelvin.localhost") == default:
                await asyncio.sleep(0.01)
        assert await shown(here, "m.default.kelvin.localhost") == {"*.default.kelvin.localhost"}
        assert await shown(here, "M.Stranger.Kelvin.LOCALHOST") == {"*.stranger.kelvin.localhost"}
        for name in ("localhost", "m.nobody.kelvin.localhost", "a.m.default.kelvin.localhost", "default.elsewhere"):
            assert await shown(here, name) == default, name


async def test_the_host_names_model_and_tenant(tmp_path: Path) -> None:
    """https://MODEL.TENANT.DOMAIN/v1/… is served under the tenant's own certificate, with the model from the name."""

    async with world(tmp_path) as here:
        await here.replica("a")
        body = b'{"prompt":"x"}'
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", here.port, ssl=here.tls, server_hostname="m.default.kelvin.localhost"
        )
        writer.write(
            http(body, "/v1/completions").replace(b"Host: localhost", b"Host: m.default.kelvin.localhost:8443")
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        writer.transport.abort()
        reader, writer = await here.raw()
        writer.write(
            http(body, "/v1/completions").replace(b"Host: localhost", b"Host: theirs.stranger.kelvin.localhost")
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        writer.transport.abort()


async def test_slow_or_idle_connection_is_closed(tmp_path: Path) -> None:
    """Handshake, head and body each have a time limit. An idle connection that was used has a longer one."""

    async def until_closed(reader: asyncio.StreamReader) -> float:
        began = time.monotonic()
        try:
            async with asyncio.timeout(60):
                await reader.read()
        except ConnectionError:
            pass
        return time.monotonic() - began

    async with world(tmp_path, handshake_s=0.3, head_s=0.3, body_s=0.3) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        assert await until_closed(reader) < SHORT_S
        writer.transport.abort()
        for said in (b"", b"GET /v1/models HT"):
            reader, writer = await here.raw(said)
            assert await until_closed(reader) < SHORT_S
            writer.transport.abort()
        reader, writer = await here.raw(http(b"x" * 100)[:-50])
        late = await reader.readuntil(b"\r\n\r\n")
        assert late.startswith(b"HTTP/1.1 504")
        assert b"\r\nx-request-id: req_" in late
        assert await until_closed(reader) < SHORT_S
        writer.transport.abort()
        reader, writer = await here.raw(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n")
        await reader.readuntil(b"}}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.8):
                await reader.read(1)
        writer.transport.abort()


async def test_pipelined_request_is_not_answered(tmp_path: Path) -> None:
    """The first request is answered, then the connection closes. A disconnect is noticed despite the second one."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", _slowly)
        body = b'{"model":"m","prompt":"x"}'
        got = await _send(here, http(body, "/v1/completions") + http(body, "/v1/completions"))
        assert got.count(b"HTTP/1.1 200") == 1
        assert got.endswith(b"<end>")
        replica.script = endless
        reader, writer = await here.raw()
        stream = b'{"model":"m","prompt":"x","stream":true}'
        writer.write(http(stream, "/v1/completions") + http(stream, "/v1/completions"))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await replica.until(lambda r: len(r.deleted) == 1)
        assert len(replica.calls) == 2


async def test_connections_are_bounded(tmp_path: Path) -> None:
    """The third of two connections is cut at once. A closed connection makes room."""

    async with world(tmp_path, connections=2) as here:
        kept = [await here.raw() for _ in range(2)]
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await here.raw()
        kept[0][1].transport.abort()
        async with asyncio.timeout(30):
            while True:
                try:
                    kept.append(await here.raw())
                    break
                except (ConnectionError, ssl.SSLError):
                    await asyncio.sleep(0.01)
        for _, writer in kept:
            writer.transport.abort()


async def test_head_and_100_continue_are_answered(tmp_path: Path) -> None:
    """HEAD is answered without a body. `Expect: 100-continue` gets 100, except with a bad key."""

    async with world(tmp_path) as here:
        await here.replica("a")
        reader, writer = await here.raw(b"HEAD /v1/models HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 405")
        raw = http(b'{"model":"m","prompt":"x"}', "/v1/completions", extra="Expect: 100-continue\r\n")
        head, _, body = raw.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        reader, writer = await here.raw(head.replace(b"Bearer kv-", b"Bearer no-") + b"\r\n\r\n")
        refused = await reader.read()
        assert refused.startswith(b"HTTP/1.1 401")
        writer.transport.abort()


async def test_http_1_0_response_is_not_chunked(tmp_path: Path) -> None:
    """A stream has no chunks and ends with its connection. `Expect` is ignored (RFC 9110, 10.1.1)."""

    async with world(tmp_path) as here:
        await here.replica("a")
        stream = http(b'{"model":"m","prompt":"x","stream":true}', "/v1/completions")
        got = await _send(here, stream.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b"transfer-encoding" not in head
        assert b"\r\nconnection: close" in head
        *events, last = body.split(b"\n\n")
        assert all(event.startswith((b"data: ", b": ")) for event in events), body
        assert (events[-1], last) == (b"data: [DONE]", b"<end>")
        expecting = http(b'{"model":"m","prompt":"x"}', "/v1/completions", extra="Expect: 100-continue\r\n")
        invited = await _send(here, expecting)
        assert invited.startswith(b"HTTP/1.1 100 Continue"), "the control"
        got = await _send(here, expecting.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert got.startswith(b"HTTP/1.1 200"), got[:100]


async def test_plain_http_is_not_spoken(tmp_path: Path) -> None:
    """A client without TLS gets no HTTP. Others are still served."""

    async with world(tmp_path) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n")
        got = b""
        try:
            async with asyncio.timeout(30):
                got = await reader.read()
        except ConnectionError:
            pass
        assert b"HTTP/1.1" not in got
        writer.transport.abort()
        assert (await here.get("/v1/models")).status == 200
