"""A network without sockets: addresses, connections that take time, break and stall, and HTTP/1.1 servers."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

import aiohttp

from kelvin.contracts.roles import Role

P = TypeVar("P", bound=asyncio.Protocol)


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request as the server reads it."""

    method: str
    path: str
    fields: dict[str, str]
    body: bytes


class FakeServer(Protocol):
    """A server at one address."""

    ignores_connections: bool  # connections to it are neither accepted nor refused

    async def serve(self, asked: ReceivedRequest, connection: "FakeConnection") -> None:
        """Answer on the connection. Cancelled when the client has gone."""
        ...


@dataclass
class Network:
    """Addresses and their servers. `random` decides all delays."""

    random: Random
    servers: dict[str, FakeServer] = field(default_factory=dict)
    connections: list["FakeConnection"] = field(default_factory=list)

    def delay_s(self) -> float:
        """Return the delay of one way between two processes."""
        return self.random.uniform(0.0001, 0.002)

    def cut(self, address: str) -> None:
        """Break all connections with that address, as its death does."""
        for connection in [each for each in self.connections if each.address == address]:
            connection.abort_by_peer()


@dataclass(eq=False)
class ClientSide:
    """The connections of one process. A dead process has none and opens none."""

    network: Network
    is_dead: bool = False

    def connector_to(self, address: str, role: Role) -> "FakeConnector":
        return FakeConnector(self, address)

    def die(self) -> None:
        """Break all its connections."""
        self.is_dead = True
        for connection in [each for each in self.network.connections if each.near is self]:
            connection.abort()


class FakeConnector:
    """A connector to one address."""

    base = "http://kelvin"

    def __init__(self, near: ClientSide, address: str) -> None:
        self._near = near
        self._network = near.network
        self._address = address

    async def connect(self, protocol: Callable[[], P]) -> P:
        await asyncio.sleep(self._network.delay_s())
        server = self._network.servers.get(self._address)
        if server is None:
            raise ConnectionRefusedError(f"nobody listens at {self._address}")
        if server.ignores_connections:
            await asyncio.Event().wait()
        if self._near.is_dead:
            raise ConnectionRefusedError("this process is dead")
        made = protocol()
        FakeConnection(self._near, self._address, server, made)
        return made

    def aiohttp_connector(self, limit: int) -> aiohttp.BaseConnector:
        """Not implemented: the simulation does not use aiohttp."""
        raise NotImplementedError


class FakeConnection(asyncio.Transport):
    """Both ends of one connection: the client's transport, and the server's writing methods."""

    def __init__(self, near: ClientSide, address: str, server: FakeServer, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.near = near
        self.address = address
        self._network = network = near.network
        self._server = server
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._read = bytearray()  # by the server
        self._serving: asyncio.Task[None] | None = None
        self._arrives_s = 0.0
        self._is_paused = False
        self._held: list[bytes] = []
        network.connections.append(self)
        protocol.connection_made(self)

    # The client's transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._read += data
            self._loop.call_later(self._network.delay_s(), self._take)

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._close(None)

    def close(self) -> None:
        self._close(None)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        held, self._held = self._held, []
        for data in held:
            self._loop.call_soon(self._deliver, data)

    # The server's side.

    def send(self, data: bytes) -> None:
        """Send data. It arrives some time later, in order."""
        self._arrives_s = max(self._arrives_s + 1e-6, self._loop.time() + self._network.delay_s())
        self._loop.call_at(self._arrives_s, self._deliver, data)

    def respond(self, status: int, body: bytes = b"", fields: Iterable[tuple[str, str]] = ()) -> None:
        """Send a whole response."""
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *(f"{n}: {v}" for n, v in fields)]
        self.send("\r\n".join((*lines, "", "")).encode() + body)

    def begin(self, status: int, fields: Iterable[tuple[str, str]] = ()) -> None:
        """Send the head of a chunked response."""
        lines = [f"HTTP/1.1 {status} X", "transfer-encoding: chunked", *(f"{n}: {v}" for n, v in fields)]
        self.send("\r\n".join((*lines, "", "")).encode())

    def chunk(self, data: bytes) -> None:
        """Send one chunk. An empty chunk ends the response."""
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def abort_by_peer(self) -> None:
        """Break the connection from the server's side."""
        self._close(ConnectionResetError("the peer has gone"))

    def _deliver(self, data: bytes) -> None:
        if self._is_paused:
            self._held.append(data)
        elif not self._is_closing:
            self._protocol.data_received(data)

    def _close(self, error: Exception | None) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._network.connections.remove(self)
        if self._serving is not None:
            self._serving.cancel()
        self._loop.call_soon(self._protocol.connection_lost, error)

    def _take(self) -> None:
        """Serve the next complete request. The client sends one request after another."""
        if self._is_closing or (self._serving is not None and not self._serving.done()):
            return
        head, found, rest = bytes(self._read).partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        length = int(fields.get("content-length", "0"))
        if len(rest) < length:
            return
        self._read = bytearray(rest[length:])
        method, path, _ = first.split(" ")
        asked = ReceivedRequest(method, path, fields, rest[:length])
        self._serving = self._loop.create_task(self._server.serve(asked, self), name=f"serve {self.address}")
        self._serving.add_done_callback(lambda _: self._take())
