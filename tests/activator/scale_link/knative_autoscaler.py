"""A fake of Knative's autoscaler that is stricter: it records messages that the real one drops silently.

It imitates pkg/autoscaler/statserver of knative/serving (98e5ef9), as recorded: any path, no subprotocol, no
compression, a pong for each ping, no messages of its own; on SIGTERM a close with 1012.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from aiohttp import WSMessage, WSMsgType, web
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from activator.scale_link.stat_encoding import message_class
from tests.stub_server import StubServer

OLD_S: Final = 60.0  # stats with an older timestamp are ignored
RESTARTING: Final = 1012


class Stat(NamedTuple):
    """An accepted stat. `connection` and `message` are numbers, from 0 on."""

    connection: int
    message: int
    revision: str
    pod: str
    concurrency: float
    requests: float


def faults(message: WSMessage, known: set[str]) -> list[str]:
    """Return why the autoscaler would silently drop the message or a part of it. `known` has NAMESPACE/NAME."""
    if message.type is not WSMsgType.BINARY:
        return [f"a frame of type {message.type!r}"]
    try:
        decoded = message_class().FromString(message.data)
    except DecodeError as error:
        return [f"no message: {error}"]
    if not decoded.messages:
        return ["an empty message"]
    found = [f"{what} has unknown fields" for what, part in _parts(decoded) if len(UnknownFieldSet(part))]
    names = [f"{each.namespace}/{each.name}" for each in decoded.messages]
    found += [f"{name} twice in one message" for name in set(names) if names.count(name) > 1]
    for name, each in zip(names, decoded.messages, strict=True):
        if name not in known:
            found.append(f"unknown revision {name}")
        found += [f"{name}: {what}" for what in _faults_of(each)]
    return found


def _parts(decoded: Any) -> list[tuple[str, Any]]:
    inner = [(what, part) for each in decoded.messages for what, part in (("an entry", each), ("a stat", each.stat))]
    return [("the message", decoded), *inner]


def _faults_of(each: Any) -> list[str]:
    if not each.HasField("stat"):
        return ["no stat"]
    stat, found = each.stat, []
    if not stat.pod_name:
        found.append("no pod name")
    figures = {name: getattr(stat, name) for name in ("average_concurrent_requests", "request_count")}
    found += [f"{name} is {value}" for name, value in figures.items() if not (math.isfinite(value) and value >= 0)]
    others = ("average_proxied_concurrent_requests", "proxied_request_count", "process_uptime")
    found += [f"{name} is for queue-proxy only" for name in others if getattr(stat, name)]
    if stat.timestamp and time.time() - stat.timestamp / 1000 > OLD_S:
        found.append("an old timestamp")
    return found


class StrictAutoscaler:
    """A server on a local port. `wrong` must be empty at the end."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        self.stats: list[Stat] = []
        self.wrong: list[str] = []
        self.connections = 0
        self.pings = 0
        self.is_mute = False  # answers no ping
        self.is_away = False  # refuses new connections
        self.is_deaf = False  # reads nothing from new connections
        self.port = 0
        self._messages = 0
        self._open: set[web.WebSocketResponse] = set()
        self._changed = asyncio.Condition()
        self._listening: StubServer | None = None

    @property
    def url(self) -> str:
        """The URL as in the setting."""
        return f"ws://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._listening = StubServer(app, shutdown_s=0.1)
        self.port = await self._listening.start_at()

    async def leave(self) -> None:
        """Close all connections as on SIGTERM. `is_away` is set until a test clears it."""
        self.is_away = True
        for socket in list(self._open):
            await socket.close(code=RESTARTING)

    async def stop(self) -> None:
        """Close all connections and stop listening."""
        await self.leave()
        if self._listening is not None:
            await self._listening.stop()
            self._listening = None

    def kill(self) -> None:
        """Break all connections as on SIGKILL. `is_away` is set until a test clears it."""
        self.is_away = True
        for socket in list(self._open):
            assert socket._req is not None
            assert socket._req.transport is not None
            socket._req.transport.abort()

    async def until(self, claim: Callable[["StrictAutoscaler"], bool]) -> None:
        """Wait until the claim holds."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: claim(self))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.wrong += [
            f"{name}: {request.headers[name]}"
            for name in ("origin", "sec-websocket-extensions", "sec-websocket-protocol")
            if name in request.headers
        ]
        if self.is_away:
            return web.Response(status=503)
        socket = web.WebSocketResponse(autoping=False, compress=False)
        await socket.prepare(request)
        number, self.connections = self.connections, self.connections + 1
        self._open.add(socket)
        await self._notify()
        try:
            if self.is_deaf:
                await asyncio.Event().wait()
            async for message in socket:
                if message.type is WSMsgType.PING:
                    self.pings += 1
                    if not self.is_mute:
                        await socket.pong(message.data)
                elif message.type is not WSMsgType.PONG:
                    self._take(number, message)
                await self._notify()
        finally:
            self._open.discard(socket)
        return socket

    def _take(self, connection: int, message: WSMessage) -> None:
        if found := faults(message, self.known):
            self.wrong += found
            return
        for each in message_class().FromString(message.data).messages:
            stat, name = each.stat, f"{each.namespace}/{each.name}"
            taken = (stat.pod_name, stat.average_concurrent_requests, stat.request_count)
            self.stats.append(Stat(connection, self._messages, name, *taken))
        self._messages += 1

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
