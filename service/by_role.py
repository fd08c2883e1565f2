"""Serves an application to our own processes on other hosts: each by the role in its certificate, within its rules."""

import asyncio
import logging
import socket
import ssl
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import NotFound
from contracts.problem import PROBLEM_CONTENT_TYPE, problem_details, status_of
from contracts.roles import Role, Rules, may_ask
from service.cause import carrying
from service.greeter import Greeter
from service.identity import peer_role
from service.loops import ready_while_loops_work
from service.run import DRAIN_S, InnerProtocol, Server, config_of, end_with

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
REMEMBERED: Final = 256  # refusals that are logged, each route and role once


class ByRole:
    """The application as one role sees it: a route that is not for it looks like none."""

    def __init__(self, app: ASGIApp, rules: Rules, role: Role, told: set[tuple[Role, str]]) -> None:
        self._app = app
        self._rules = rules
        self._role = role
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HTTP only."""
        path: str = scope["path"]
        if may_ask(self._rules, self._role, path):
            await self._app(scope, receive, send)
            return
        if (key := (self._role, path[:80])) not in self._told and len(self._told) < REMEMBERED:
            self._told.add(key)
            log.warning("a route is not for this role", extra={"role": str(self._role), "path": path[:80]})
        failure = NotFound("route", path[:80])
        headers = [(b"content-type", PROBLEM_CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": status_of(failure), "headers": headers})
        await send({"type": "http.response.body", "body": problem_details(failure)})


async def serve_by_role(
    app: ASGIApp,
    listener: socket.socket,
    tls: ssl.SSLContext,
    rules: Rules,
    stop: asyncio.Event,
    drain_s: int = DRAIN_S,
) -> None:
    """HTTP/1.1 over `tls`, a context of `Identity.server`, until `stop`; the rest is as with `serve_until`."""
    server = _Server(carrying(ready_while_loops_work(app)), listener, tls, rules, drain_s)
    async with asyncio.TaskGroup() as tasks:
        ender = tasks.create_task(end_with(stop, server))
        await server.serve(sockets=[])
        ender.cancel()


class _Server(Server):
    """Connections come from a greeter."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext, rules: Rules, drain_s: int) -> None:
        super().__init__(config_of(app, drain_s))
        told: set[tuple[Role, str]] = set()
        self.config.load()

        def make() -> asyncio.Protocol:
            return _Connection(self, rules, told)

        self._greeter = Greeter(
            listener, tls, make,
            is_full=lambda: len(self.server_state.connections) >= MAX_CONNECTIONS, refused=_refused,
        )  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._greeter.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._greeter.close()
        await super().shutdown(sockets)
        await self._greeter.end()

    async def cut(self, sockets: list[socket.socket]) -> None:
        if self.started:
            await self._greeter.close()
        await super().cut(sockets)
        await self._greeter.end()


class _Connection(InnerProtocol):
    """Knows who is at the other end before the first request."""

    def __init__(self, server: _Server, rules: Rules, told: set[tuple[Role, str]]) -> None:
        super().__init__(config=server.config, server_state=server.server_state, app_state={})
        self._rules = rules
        self._told = told

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        role = peer_role(transport.get_extra_info("ssl_object"))
        self.app = ByRole(self.app, self._rules, role, self._told)


def _refused(error: OSError | None) -> None:
    why = "too many connections" if error is None else f"{type(error).__name__}: {error}"
    log.warning("a connection was refused", extra={"why": why[:200]})
