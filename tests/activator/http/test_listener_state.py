"""What an address may cost before authentication: connections, requests, and slow bodies. Abuse comes from 127.0.0.2.
Meanwhile a client from a trusted address is served.
"""

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from tests.activator.world import CHAT, ActivatorWorld, http, world

ABUSER, OTHER = "127.0.0.2", "127.0.0.3"
OURS = "127.0.0.1"
ASK = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def _connect(here: ActivatorWorld, source: str) -> asyncio.StreamWriter | None:
    try:
        _, writer = await here.raw(source=source)
    except (ConnectionError, ssl.SSLError):
        return None
    return writer


async def _until_busy(here: ActivatorWorld, path: bytes) -> bytes:
    """Send requests until the answer is 429. Return that answer."""
    async with asyncio.timeout(30):
        while True:
            try:
                reader, writer = await here.raw(source=ABUSER)
            except (ConnectionError, ssl.SSLError):
                await asyncio.sleep(0.05)
                continue
            got = b""
            while not got.startswith(b"HTTP/1.1 429"):
                writer.write(ASK % path)
                got = await reader.readuntil(b"\r\n\r\n")
                length = int(got.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                got += await reader.readexactly(length)
            assert await reader.read() == b"", "the connection is closed"
            writer.transport.abort()
            return got


async def test_connections_per_address_are_bounded(tmp_path: Path) -> None:
    """The third of two connections is cut, but not of another or a trusted address. A closed one makes room."""

    async with world(tmp_path, trusted_addresses=OURS, address_connections=2) as here:
        kept = [await _connect(here, ABUSER) for _ in range(3)]
        assert [writer is not None for writer in kept] == [True, True, False]
        for _ in range(4):
            kept.append(await _connect(here, OURS))
            assert kept[-1] is not None, "a trusted load balancer has many clients"
        kept.append(await _connect(here, OTHER))
        assert kept[-1] is not None
        assert (await here.get("/v1/models")).status == 200
        assert await here.metric_value("kelvin_connections_refused_total", limit="address") == 1
        assert kept[0] is not None
        kept[0].transport.abort()
        async with asyncio.timeout(10):
            while (again := await _connect(here, ABUSER)) is None:
                await asyncio.sleep(0.01)
        for writer in [*kept, again]:
            if writer is not None:
                writer.transport.abort()


async def test_requests_per_address_are_rate_limited(tmp_path: Path) -> None:
    """A request above the rate gets 429 `address_busy`. Other clients are not limited."""

    async with world(tmp_path, trusted_addresses=OURS, address_rate=1) as here:
        head, _, body = (await _until_busy(here, b"/v1/models")).partition(b"\r\n\r\n")
        assert b"\r\nretry-after: 1" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("address_busy", "rate_limit_error")
        assert f"\r\nx-request-id: {error['request_id']}\r\n".encode() in head
        for _ in range(30):
            assert (await here.get("/v1/models")).status == 200
        assert await here.metric_value("kelvin_refusals_total", outcome="address_busy", status="429") == 1


@pytest.mark.deep
async def test_opening_connections_counts_as_requests(tmp_path: Path) -> None:
    """A client that only performs handshakes is cut too. Without the limit the same client is let in."""

    async def opened(here: ActivatorWorld) -> int:
        count = 0
        for _ in range(40):
            if (writer := await _connect(here, ABUSER)) is not None:
                count += 1
                writer.transport.abort()
        return count

    (tmp_path / "bound").mkdir()
    (tmp_path / "free").mkdir()

    async with world(tmp_path / "bound", trusted_addresses=OURS, address_rate=1) as here:
        assert await opened(here) < 40
    async with world(tmp_path / "free", trusted_addresses=OURS) as here:
        assert await opened(here) == 40


@pytest.mark.parametrize(
    "rate", [pytest.param(200, id="bounded"), pytest.param(0, id="control: no bound", marks=pytest.mark.deep)]
)
async def test_slow_body_is_cut(tmp_path: Path, rate: int) -> None:
    """A body that sends a byte now and then is cut after one window. A normal one is served."""

    async with world(tmp_path, head_s=0.5, body_rate=rate) as here:
        await here.replica("a")
        reader, writer = await here.raw()
        raw = http(json.dumps(CHAT).encode())
        writer.write(raw[:-30])
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        sent = -30
        while not answer.done() and sent < -1:  # 1.5 s
            await asyncio.wait({answer}, timeout=0.05)
            writer.write(raw[sent : sent + 1])
            sent += 1
        if not rate:
            writer.write(raw[sent:])
        assert (await here.post()).status == 200
        got = await answer
        assert got.startswith(b"HTTP/1.1 504" if rate else b"HTTP/1.1 200"), got
        writer.transport.abort()


@pytest.mark.deep
async def test_uninvited_body_is_not_late(tmp_path: Path) -> None:
    """A client with `Expect: 100-continue` waits while its refusal is delayed. It gets the refusal, not a timeout."""

    async with world(tmp_path, head_s=0.2, body_rate=1e6) as here:
        wrong = http(b"x" * 100, key="wrong", extra="Expect: 100-continue\r\n")[:-100]
        for _ in range(24):  # 20 are free; the last is held for 0.8 s
            reader, writer = await here.raw(wrong)
            got = await reader.read()
            assert got.startswith((b"HTTP/1.1 401", b"HTTP/1.1 429")), got
            writer.transport.abort()
