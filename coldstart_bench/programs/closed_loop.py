"""Closed-loop client: whole requests, or many streams. For machines without wrk, and because wrk reads no streams.

It prints `ready`, then answers lines of JSON:

- `{"do": "load", "url", "connections", "seconds", "body", "key"}`: the same answer as wrk's script.
- `open` with `streams`: answered once each stream has its first token.
- `read` with `seconds`: the tokens that arrived in that time.
- `close`: close the streams.

Certificates are not verified, as in wrk.
"""

import asyncio
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from coldstart_bench.harness.load_protocol import RequestTemplate
from coldstart_bench.programs.json_lines import answer_lines

TOKEN = b"data: {"
PATIENCE_S = 30.0


def context() -> ssl.SSLContext:
    """Return a TLS client context that verifies nothing."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def request_of(command: dict[str, Any]) -> bytes:
    """Return the bytes of a POST request."""
    return RequestTemplate(command["key"], urlsplit(command["url"]).path, command["body"]).request()


class ClosedLoopProtocol(asyncio.Protocol):
    """Sends one request at a time, the next one when the response is complete."""

    def __init__(self, payload: bytes, latencies_us: list[int], bad: list[bytes]) -> None:
        self._payload, self._latencies_us, self._bad = payload, latencies_us, bad
        self._unread = b""
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no instances of it

    def begin(self) -> None:
        """Send the first request."""
        self._began_ns = time.monotonic_ns()
        self.transport.write(self._payload)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            self._bad.append(b"the connection was lost")

    def data_received(self, data: bytes) -> None:
        self._unread += data
        end = self._unread.find(b"\r\n\r\n")
        if end < 0 or self.is_over:
            return
        head = self._unread[:end].lower()
        length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        if len(self._unread) < end + 4 + length:
            return
        if head.startswith(b"http/1.1 200"):
            self._latencies_us.append((time.monotonic_ns() - self._began_ns) // 1000)
        else:
            self._bad.append(self._unread)
        self._unread = b""
        self.begin()


class StreamProtocol(asyncio.Protocol):
    """Counts the tokens of one stream."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._tail = b""
        self.tokens = 0
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no instances of it
        self.transport.write(self._payload)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.first.done():
            self.first.set_exception(exc or ConnectionResetError("before its first token"))

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        self.tokens += text.count(TOKEN)
        self._tail = text[-(len(TOKEN) - 1) :]
        if self.tokens and not self.first.done():
            self.first.set_result(None)


class Loader:
    """Answers commands. Streams stay open from one command to the next."""

    def __init__(self) -> None:
        self._streams: list[StreamProtocol] = []

    async def answer(self, command: dict[str, Any]) -> dict[str, object]:
        """Answer one line of JSON."""
        match command["do"]:
            case "load":
                return await self._load(command)
            case "open":
                payload = request_of(command)
                made = [
                    self._connect(command["url"], lambda: StreamProtocol(payload)) for _ in range(command["streams"])
                ]
                self._streams = await asyncio.gather(*made)
                await asyncio.wait_for(asyncio.gather(*(stream.first for stream in self._streams)), PATIENCE_S)
            case "read":
                before = sum(stream.tokens for stream in self._streams)
                await asyncio.sleep(command["seconds"])
                return {"tokens": sum(stream.tokens for stream in self._streams) - before}
            case "close":
                for stream in self._streams:
                    stream.transport.abort()
        return {}

    async def _load(self, command: dict[str, Any]) -> dict[str, object]:
        latencies_us: list[int] = []
        bad: list[bytes] = []
        payload = request_of(command)
        made = [
            self._connect(command["url"], lambda: ClosedLoopProtocol(payload, latencies_us, bad))
            for _ in range(command["connections"])
        ]
        loops = await asyncio.wait_for(asyncio.gather(*made), PATIENCE_S)
        began = time.perf_counter()
        for loop in loops:
            loop.begin()
        await asyncio.sleep(command["seconds"])
        seconds = time.perf_counter() - began
        for loop in loops:
            loop.is_over = True
            loop.transport.abort()
        latencies_us.sort()
        at = {
            name: latencies_us[int(part * len(latencies_us))] if latencies_us else 0
            for name, part in (("p50", 0.5), ("p99", 0.99))
        }
        return {
            "requests": len(latencies_us),
            "us": int(seconds * 1e6),
            "p50_us": at["p50"],
            "p99_us": at["p99"],
            "bad": len(bad),
        }

    async def _connect(self, url: str, make: Any) -> Any:
        where = urlsplit(url)
        assert where.port is not None
        tls = context() if where.scheme == "https" else None
        name = "localhost" if tls else None
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(make, "127.0.0.1", where.port, ssl=tls, server_hostname=name)
        return protocol


def main() -> None:
    """Answer lines until stdin ends."""
    loader = Loader()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_lines(lambda **command: runner.run(loader.answer(command)))


if __name__ == "__main__":
    main()
