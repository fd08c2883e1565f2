"""Clients on kept-alive connections that record every connection that ends without an announcement."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence

Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class KeepAliveClients:
    """Clients that send a request, wait a little, and send it again on the same connection. After `Connection: close` a
    client opens another connection.
    """

    def __init__(self, connect: Callable[[], Awaitable[Connected]], requests: Sequence[bytes]) -> None:
        self._connect = connect
        self._requests = requests
        self._stop = asyncio.Event()
        self.answered = 0
        self.failures: list[str] = []

    async def run_during(self, clients: int, work: Callable[[], Awaitable[None]]) -> None:
        """Send requests while `work` runs, and for some responses before and after it."""
        client_tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]
        try:
            await self._more(4 * clients)
            await work()
            await self._more(4 * clients)
        finally:
            self._stop.set()
            await asyncio.gather(*client_tasks)

    async def _more(self, answers: int) -> None:
        wanted = self.answered + answers
        async with asyncio.timeout(120):
            while self.answered < wanted:
                await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        raw = self._requests[number % len(self._requests)]
        while not self._stop.is_set():
            try:
                reader, writer = await self._connect()
                while await self._ask(reader, writer, raw):
                    await asyncio.sleep(0.02 * (number % 5))
                writer.transport.abort()
            except (OSError, ssl.SSLError, asyncio.IncompleteReadError) as error:
                self.failures.append(f"client {number}: {error!r}")
                await asyncio.sleep(0.02)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes) -> bool:
        """Send one request. Return whether the connection may be used again."""
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
        if head.startswith(b"http/1.1 200"):
            self.answered += 1
        else:
            self.failures.append(head[:40].decode())
        return b"\r\nconnection: close\r\n" not in head and not self._stop.is_set()
