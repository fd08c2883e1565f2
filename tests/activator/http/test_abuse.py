"""Abusive requests, one by one: each is refused, reaches no replica, costs little CPU and disturbs no other client.
They come from 127.0.0.2 with a valid key, so that only their form can refuse them.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.activator.control import KEY
from tests.activator.world import ActivatorWorld, http, world

ABUSER, OURS = "127.0.0.2", "127.0.0.1"
BODY = b'{"model":"m","prompt":"x"}'
GOOD = http(BODY, "/v1/completions")
HEAD, _, _ = GOOD.partition(b"Content-Length")
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
# The second request that a smuggler hides. It must not be answered.
SECOND = http(BODY, "/v1/completions")

# Malformed before the body is read: 400, and nothing reaches a replica.
MALFORMED = {
    "a length together with chunks": HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks together with a length": HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths that differ": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "the same length twice": HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": HEAD + LENGTH.replace(b"\r", b", 0\r") + b"\r\n" + BODY,
    "a length with a sign": HEAD + LENGTH.replace(b": ", b": +") + b"\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length in hex": HEAD + b"Content-Length: 0x1a\r\n\r\n" + BODY,
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked is not the last coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "two codings, the second unknown": HEAD + CHUNKED + b"Transfer-Encoding: x\r\n\r\n" + CHUNKS,
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
    "a folded header": HEAD + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "a line feed alone": HEAD + LENGTH.replace(b"\r\n", b"\n") + b"\r\n" + BODY,
    "a carriage return alone": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
    "a NUL in a value": HEAD + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in a name": HEAD + b"X\x00: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in the target": GOOD.replace(b"completions", b"comple\x00tions", 1),
    "a header name that is not a token": HEAD + b"X(y): a\r\n" + LENGTH + b"\r\n" + BODY,
    "another host in the target": GOOD.replace(b" /v1", b" http://elsewhere/v1", 1),
    "a target without a path": GOOD.replace(b"POST /v1/completions", b"CONNECT localhost:443", 1),
    "two hosts": HEAD + b"Host: elsewhere\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": GOOD.replace(b"Host: localhost\r\n", b"", 1),
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0", 1) + CHUNKED + b"\r\n" + CHUNKS,
    "no version": b"GET /v1/models\r\n\r\n",
    "another protocol's greeting": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a chunk size that is not a number": HEAD + CHUNKED + b"\r\nzz\r\n",
    "a chunk of a negative size": HEAD + CHUNKED + b"\r\n-1\r\n",
    "a chunk beyond 64 bits": HEAD + CHUNKED + b"\r\nfffffffffffffffff\r\n",
    "a chunk that is longer than it says": HEAD + CHUNKED + b"\r\n1\r\nabc\r\n0\r\n\r\n",
    "a line feed alone behind a size": HEAD + CHUNKED + b"\r\n1a\n" + BODY + b"\r\n0\r\n\r\n",
    "an endless extension": HEAD + CHUNKED + b"\r\n1;" + b"x" * 500_000,
    "an extension of NULs": HEAD + CHUNKED + b"\r\n1;\x00\x00\r\nx\r\n0\r\n\r\n",
}
# Too large: 413 for a body, 431 for a head.
TOO_LARGE = {
    "a length above the limit": HEAD + b"Content-Length: 9000000\r\n\r\n" + BODY,
    "a head of 40 kB": HEAD + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
    "a head without end": HEAD + b"X: " + b"a" * 400_000,
    "a thousand headers": HEAD + b"x: a\r\n" * 1000 + b"\r\n",
    "a target of 40 kB": GOOD.replace(b"/v1/completions", b"/v1/" + b"a" * 40_000, 1),
    "trailers without end": HEAD + CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"x: a\r\n" * 100_000,
}
REPEATS = 40
CPU_S = 0.02  # of one abusive request with its TLS handshake; about 2 ms as measured


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _send(here: ActivatorWorld, raw: bytes) -> bytes:
    """Send the bytes and a second request behind them. Read until the connection ends."""
    got = b""
    reader, writer = await here.raw(source=ABUSER)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        writer.write(raw + SECOND)
        async with asyncio.timeout(20):
            while data := await reader.read(1 << 16):
                got += data
    writer.transport.abort()
    return got


@dataclass
class NormalClient:
    """A normal client: how often it was served, and how often not."""

    served: int = 0
    wrong: int = 0


@contextlib.asynccontextmanager
async def _normal_client(here: ActivatorWorld) -> AsyncIterator[NormalClient]:
    seen, stop = NormalClient(), asyncio.Event()

    async def ask() -> None:
        while not stop.is_set():
            async with asyncio.timeout(20):
                status = (await here.get("/v1/models")).status
            seen.served += status == 200
            seen.wrong += status != 200
            await asyncio.sleep(0.01)

    asking = asyncio.create_task(ask())
    try:
        yield seen
    finally:
        stop.set()
        await asking
    assert seen.served
    assert not seen.wrong


@contextlib.asynccontextmanager
async def _abused(
    tmp_path: Path, of_one: int = 1024, total: int = 8192, head_s: int = 5
) -> AsyncIterator[ActivatorWorld]:
    """Start an activator and a normal client. At the end, check that no abusive request reached the replica."""
    async with world(
        tmp_path,
        trusted_addresses=OURS,
        address_rate=100_000,
        address_connections=of_one,
        connections=total,
        head_s=head_s,
    ) as here:
        replica = await here.replica("a")
        assert (await here.post("/v1/completions", BODY)).status == 200
        async with _normal_client(here):
            yield here
        assert (await here.post("/v1/completions", BODY)).status == 200
        assert len(replica.calls) == 2, "an abuse has reached a replica"


async def test_no_form_of_smuggling_passes(tmp_path: Path) -> None:
    """Each gets 400 and its connection ends. The hidden request is not answered, and nothing reaches a replica."""

    async with _abused(tmp_path) as here:
        for name, raw in MALFORMED.items():
            got = await _send(here, raw)
            is_reset = got == b"" and len(raw) > 100_000  # closed while more was being sent
            assert is_reset or got.startswith(b"HTTP/1.1 400"), (name, got[:100])
            assert is_reset or b"\r\nx-request-id: req_" in got, name
            assert got.count(b"HTTP/1.1 ") <= 1, (name, got)


async def test_what_is_too_large_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    """The response is 413, 431 or 400, or a reset while more is being sent. The hidden request is not answered."""

    async with _abused(tmp_path) as here:
        for name, raw in TOO_LARGE.items():
            got = await _send(here, raw)
            is_reset = got == b"" and len(raw) > 100_000
            refused = (b"HTTP/1.1 413", b"HTTP/1.1 431", b"HTTP/1.1 400")
            assert is_reset or got.startswith(refused), (name, got[:90])
            assert got.count(b"HTTP/1.1 ") <= 1, (name, got)


async def test_control_a_good_request_passes_and_is_seen(tmp_path: Path) -> None:
    """A valid request sent in the same way gets one 200 and reaches the replica. The one behind it is not answered."""

    async with world(tmp_path, trusted_addresses=OURS) as here:
        replica = await here.replica("a")
        for raw in (GOOD, HEAD + CHUNKED + b"\r\n" + CHUNKS):
            got = await _send(here, raw)
            assert got.startswith(b"HTTP/1.1 200"), got[:100]
            assert got.count(b"HTTP/1.1 ") == 1
        assert len(replica.calls) == 2


@pytest.mark.deep
async def test_abusive_request_costs_little_cpu(tmp_path: Path) -> None:
    """Measured is the activator's CPU time per request with its handshake, averaged over many."""

    async with _abused(tmp_path) as here:
        for name, raw in (MALFORMED | TOO_LARGE).items():
            before_s = _cpu_s(here.process.pid)
            for _ in range(REPEATS):
                await _send(here, raw)
            assert (_cpu_s(here.process.pid) - before_s) / REPEATS < CPU_S, name


@pytest.mark.deep
@pytest.mark.parametrize("bound", [pytest.param(50, id="bounded"), pytest.param(1000, id="control: no bound")])
async def test_slowloris_is_limited_to_its_own_connections(tmp_path: Path, bound: int) -> None:
    """One address opens 300 connections with endless heads; there is room for 200. Without the bound per address no
    other client connects.
    """

    async def try_open(here: ActivatorWorld, source: str) -> asyncio.StreamWriter | None:
        try:
            _, writer = await here.raw(source=source)
        except (ConnectionError, ssl.SSLError):
            return None
        return writer

    async with _abused(tmp_path, of_one=bound, total=200, head_s=20) as here:
        opened = [await try_open(here, ABUSER) for _ in range(300)]
        held = [writer for writer in opened if writer is not None]
        for writer in held:
            writer.write(b"GET /v1/models HTTP/1.1\r\nX: ")
        assert len(held) < 200
        ours = await try_open(here, OURS)
        assert (ours is not None) == (bound == 50)
        which = "address" if bound == 50 else "all"
        assert await here.metric_value("kelvin_connections_refused_total", limit=which) > 0
        for writer in [*held, *([ours] if ours else [])]:
            writer.transport.abort()


@pytest.mark.deep
async def test_bulk_key_guessing_delays_no_other_caller(tmp_path: Path) -> None:
    """200 connections from 20 addresses guess keys. No guess is accepted, and the normal client is served."""

    async with _abused(tmp_path) as here:
        statuses: list[bytes] = []
        now_s = asyncio.get_running_loop().time
        least_s, end_s = now_s() + 4, now_s() + 60

        async def guess(number: int) -> None:
            # A busy machine needs longer for as many guesses as an address may make.
            while now_s() < least_s or (b"429" not in statuses and now_s() < end_s):
                with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
                    reader, writer = await here.raw(source=f"127.0.1.{1 + number % 20}")
                    for attempt in range(50):
                        writer.write(http(BODY, "/v1/completions", f"{KEY[:-6]}{number:03}{attempt:03}"))
                        head = await reader.readuntil(b"\r\n\r\n")
                        statuses.append(head[9:12])
                        if b"connection: close" in head:
                            break
                        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
                        await reader.readexactly(length)
                    writer.transport.abort()

        before_s = _cpu_s(here.process.pid)
        await asyncio.gather(*(guess(number) for number in range(200)))
        assert set(statuses) <= {b"401", b"429"}
        assert b"429" in statuses
        assert (_cpu_s(here.process.pid) - before_s) / len(statuses) < CPU_S
