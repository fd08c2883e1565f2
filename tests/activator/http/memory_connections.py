"""Connections of the edge over in-memory sockets, and the requests that the application received."""

import asyncio
import ssl
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from activator.accounting.metrics import RequestMetrics
from activator.app.settings import read_settings
from activator.http.http1_protocol import Http1Protocol
from activator.http.listener_state import ListenerState
from activator.routing.request_routes import parse_host
from kelvin.contracts.errors import Failure
from kelvin.telemetry.policy.instruments import MetricsPage


class MemorySocket(asyncio.Transport):
    """A transport that accepts and keeps every write. `waiting` is the number of bytes that the client has not read."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self.waiting = 0
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

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
class DeliveredRequest:
    """One request as the application received it. `body` is the part received so far."""

    method: str
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    is_complete: bool = False


@dataclass(slots=True)
class Application:
    """An application that reads each request to its end and answers 200 without a body. Requests are in `delivered`, in
    order. With `answers_early` it does not wait for the end of the body. Like the front door, it refuses a request
    without exactly one Host.
    """

    answers_early: bool = False
    delivered: list[DeliveredRequest] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        if isinstance(parse_host([value for name, value in scope["headers"] if name == b"host"]), Failure):
            refused = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({**answer, "status": 400, "headers": refused})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        seen = DeliveredRequest(scope["method"], target, scope["http_version"], list(scope["headers"]))
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


class MemoryServer:
    """The edge in front of one application, without a port. Use inside a running event loop."""

    def __init__(self, application: ASGIApp) -> None:
        limits = read_settings({"KELVIN_DATA": "/unused"}).connections
        self._listener_state = ListenerState(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), limits, RequestMetrics(MetricsPage("activator"))
        )
        self._config = uvicorn.Config(
            application, lifespan="off", log_config=None, proxy_headers=False, interface="asgi3"
        )
        self.state = ServerState()

    def http1(self, protocol: type[Http1Protocol] = Http1Protocol) -> tuple[Http1Protocol, MemorySocket]:
        """Return a new HTTP/1.1 connection and its socket."""
        here, socket = protocol(self._listener_state, self._config, self.state, {}), MemorySocket()
        here.raw, here.source = socket, None
        here.connection_made(socket)
        return here, socket

    async def run_tasks_to_end(self) -> None:
        """Run the application until none of its tasks is left."""
        while self.state.tasks:
            await asyncio.sleep(0)


class MemoryConnection:
    """One HTTP/1.1 connection to an `Application`. Call `close` at the end."""

    def __init__(self, protocol: type[Http1Protocol] = Http1Protocol, *, answers_early: bool = False) -> None:
        self.application = Application(answers_early)
        self._server = MemoryServer(self.application)
        self._protocol, self.socket = self._server.http1(protocol)

    @property
    def delivered(self) -> list[DeliveredRequest]:
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
        await self._server.run_tasks_to_end()
