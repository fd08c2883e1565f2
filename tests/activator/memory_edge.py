"""An HTTP/1.1 connection of the edge over an in-memory socket, and the requests that the application received."""

import asyncio
import ssl
from dataclasses import dataclass, field

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from activator.edge_http import HttpProtocol
from activator.gate import Gate
from activator.meters import Meters
from activator.routes import host_of
from activator.settings import read_settings
from contracts.errors import Failure
from telemetry.policy.instruments import Page


class MemorySocket(asyncio.Transport):
    """A transport that accepts every write at once and keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass(slots=True)
class Delivered:
    """One request as the application saw it. `body` is what came of the body so far."""

    method: str
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    is_complete: bool = False


@dataclass(slots=True)
class Application:
    """Reads each request to its end and answers 200 without a body. Requests are in `delivered`, in order.

    With `answers_early` it does not wait for the end of the body. As the door does, it refuses a request that does not
    have exactly one Host.
    """

    answers_early: bool = False
    delivered: list[Delivered] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        if isinstance(host_of([value for name, value in scope["headers"] if name == b"host"]), Failure):
            refused = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({**answer, "status": 400, "headers": refused})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        seen = Delivered(scope["method"], target, scope["http_version"], list(scope["headers"]))
        self.delivered.append(seen)
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            seen.body += message["body"]
            if self.answers_early or not message["more_body"]:
                break
        seen.is_complete = not message["more_body"]
        await send(answer)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class MemoryEdge:
    """One connection. Use inside a running event loop, and call `close` at the end."""

    def __init__(self, protocol: type[HttpProtocol] = HttpProtocol, *, answers_early: bool = False) -> None:
        limits = read_settings({"KELVIN_DATA": "/unused"}).edge
        gate = Gate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), limits, Meters(Page("activator")))
        self.application = Application(answers_early)
        self.socket = MemorySocket()
        self._server = ServerState()
        config = uvicorn.Config(
            self.application, lifespan="off", log_config=None, proxy_headers=False, interface="asgi3"
        )
        self._protocol = protocol(gate, config, self._server, {})
        self._protocol.raw, self._protocol.source = self.socket, None
        self._protocol.connection_made(self.socket)

    @property
    def delivered(self) -> list[Delivered]:
        """Every request that reached the application, in order."""
        return self.application.delivered

    async def feed(self, data: bytes) -> None:
        """Let the connection read `data`, then run the application until it waits for more."""
        if not self.socket.closing:
            self._protocol.data_received(data)
        for _ in range(4):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the connection and wait for its tasks."""
        self._protocol.connection_lost(None)
        while self._server.tasks:
            await asyncio.sleep(0)
