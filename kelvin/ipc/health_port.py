"""Serve health and metrics over plain TCP for clients without a certificate: a kubelet's probes, a scraper.

Only three routes of the application are served, one request per connection. Anybody may reach the port, so everything
is bounded.
"""

import asyncio
import socket
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kelvin.process.loops import ready_while_loops_work
from kelvin.process.service_lifecycle import InnerProtocol, Server, uvicorn_config

HEALTH_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})
MAX_CONNECTIONS: Final = 64
CONNECTION_LIFETIME_S: Final = 10.0  # a connection is cut after this time, answered or not


class HealthOnlyApp:
    """An ASGI wrapper that passes only GETs of `HEALTH_PATHS` and closes the connection after each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request. Other paths get a 404."""

        async def ending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["method"] == "GET" and scope["path"] in HEALTH_PATHS:
            await self._app(scope, receive, ending)
            return
        await ending({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await ending({"type": "http.response.body", "body": b""})


async def serve_health(
    app: ASGIApp, listener: socket.socket, stop: asyncio.Event, drain_s: int, lifetime_s: float = CONNECTION_LIFETIME_S
) -> None:
    """Serve `HEALTH_PATHS` of `app` over plain HTTP/1.1 until `stop`."""
    config = uvicorn_config(HealthOnlyApp(ready_while_loops_work(app)), drain_s)

    class Connection(InnerProtocol):
        """Cut after `lifetime_s`; refused above MAX_CONNECTIONS."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self._over: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
                return
            self._over = self.loop.call_later(lifetime_s, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._over is not None:
                self._over.cancel()

    config.http = Connection
    await Server(config).serve_until(stop, [listener])
