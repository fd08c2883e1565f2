"""A client that says HTTP/2 frame by frame, well or not, and knows how its connection ended."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from hyperframe.frame import Frame

from activator.edge_frames import PREFACE, FrameReader
from activator.policy.h2_bounds import Kind
from tests.activator.control import KEY
from tests.activator.world import CHAT, World

PATH = "/v1/chat/completions"
Fields = list[tuple[str, str]]


def fields(method: str = "GET", path: str = "/v1/models", key: str = KEY, *more: tuple[str, str]) -> Fields:
    """A head as it should be."""
    pseudo = [(":method", method), (":scheme", "https"), (":authority", "localhost"), (":path", path)]
    return [*pseudo, ("authorization", f"Bearer {key}"), *more]


@dataclass
class Heard:
    """What one stream has said."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None


@dataclass
class Client:
    """`h2` does what is right; `send` says anything. `gives_room`: flow control is given back as data comes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    h2: H2Connection
    gives_room: bool = True
    raw: bytes = b""  # all that has come
    goaways: list[int] = field(default_factory=list)
    heard: dict[int, Heard] = field(default_factory=dict)

    def send(self, data: bytes = b"") -> None:
        """What `h2` has to say, then these bytes."""
        self.writer.write(self.h2.data_to_send() + data)

    def frame(self, frame: Frame) -> None:
        """One that may be wrong."""
        self.send(frame.serialize())

    def ask(self, body: object | None = None, head: Fields | None = None, *, ends: bool = True) -> int:
        """A request; its stream."""
        number = self.h2.get_next_available_stream_id()
        post = fields("POST", PATH, KEY, ("content-type", "application/json"))
        self.h2.send_headers(number, head or (fields() if body is None else post), end_stream=ends and body is None)
        if body is not None:
            self.h2.send_data(number, body if isinstance(body, bytes) else json.dumps(body).encode(), end_stream=ends)
        self.heard[number] = Heard()
        self.send()
        return number

    async def read(self) -> bool:
        """What has come; False at the end."""
        data = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            data = await self.reader.read(1 << 16)
        if not data:
            return False
        self.raw += data
        for event in self.h2.receive_data(data):
            self._hear(event)
        self.send()
        return True

    def _hear(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                heard = self.heard.setdefault(event.stream_id or 0, Heard())
                heard.headers = {str(name): str(value) for name, value in event.headers or []}
                heard.status = int(heard.headers[":status"])
            case DataReceived():
                self.heard[event.stream_id or 0].body += event.data or b""
                if self.gives_room:
                    self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
            case StreamEnded():
                self.heard[event.stream_id or 0].ended = True
            case StreamReset():
                self.heard.setdefault(event.stream_id or 0, Heard()).reset = int(event.error_code or 0)
            case ConnectionTerminated():
                self.goaways.append(int(event.error_code or 0))

    async def until(self, claim: Callable[[], bool]) -> None:
        """Read until it holds."""
        async with asyncio.timeout(30):
            while not claim():
                assert await self.read(), f"the connection ended: {self.goaways}"

    async def answer(self, number: int) -> Heard:
        """The whole of it."""
        heard = self.heard[number]
        await self.until(lambda: heard.ended or heard.reset is not None)
        return heard

    async def end(self) -> int | None:
        """The error that the connection ends with; None where it is cut without one."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with asyncio.timeout(30):
                while data := await self.reader.read(1 << 16):
                    self.raw += data
        frames = FrameReader().feed(PREFACE + self.raw)
        codes = [int.from_bytes(frame.raw[13:17], "big") for frame in frames if frame.kind == Kind.GOAWAY]
        return codes[-1] if codes else None


@contextlib.asynccontextmanager
async def connected(
    here: World, *, source: str = "127.0.0.1", gives_room: bool = True, greets: bool = True, **settings: int
) -> AsyncIterator[Client]:
    """Connected, and greeted unless `greets` is not; cut at the end. `settings` by their names in `h2`."""
    tls = ssl.create_default_context(cafile=str(here.data / "ca.pem"))
    tls.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", here.port, ssl=tls, server_hostname="localhost", local_addr=(source, 0)
    )
    h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False))
    made = Client(reader, writer, h2, gives_room)
    for name, value in settings.items():
        setattr(h2.local_settings, name, value)
    h2.local_settings.acknowledge()
    if greets:
        h2.initiate_connection()
        made.send()
        await made.until(lambda: h2.remote_settings.max_concurrent_streams < 1 << 31)
    try:
        yield made
    finally:
        writer.transport.abort()


__all__ = ["CHAT", "PATH", "PREFACE", "Client", "connected", "fields"]
