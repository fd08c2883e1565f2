"""Send one request over HTTP/3 with aioquic."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent

Header = tuple[bytes, bytes]


class _Client(QuicConnectionProtocol):
    """A connection with one request on it."""

    def request(self, headers: Sequence[Header], body: bytes) -> None:
        self._h3 = H3Connection(self._quic)
        self.ended = self._loop.create_future()
        self.headers: list[Header] = []
        self.body = b""
        stream = self._quic.get_next_available_stream_id()
        self._h3.send_headers(stream, list(headers))
        self._h3.send_data(stream, body, end_stream=True)
        self.transmit()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, ConnectionTerminated) and not self.ended.done():
            self.ended.set_exception(ConnectionError(event.reason_phrase))
        if hasattr(self, "_h3"):
            for each in self._h3.handle_event(event):
                self._handle_h3_event(each)

    def _handle_h3_event(self, event: H3Event) -> None:
        if isinstance(event, HeadersReceived):
            self.headers += event.headers
        elif isinstance(event, DataReceived):
            self.body += event.data
        if isinstance(event, HeadersReceived | DataReceived) and event.stream_ended:
            self.ended.set_result(None)


async def post(port: int, trusted: Path, path: str, headers: Sequence[Header], body: bytes) -> tuple[int, bytes]:
    """Return status and body of the answer from `localhost`. Raises ConnectionError or TimeoutError."""
    quic = QuicConfiguration(alpn_protocols=H3_ALPN, verify_mode=ssl.CERT_REQUIRED, cafile=str(trusted))
    quic.server_name = "localhost"
    async with connect("127.0.0.1", port, configuration=quic, create_protocol=_Client) as client:
        assert isinstance(client, _Client)
        pseudo = [
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":authority", b"localhost"),
            (b":path", path.encode()),
        ]
        client.request([*pseudo, *headers], body)
        async with asyncio.timeout(60):
            await client.ended
        return int(dict(client.headers)[b":status"]), client.body
