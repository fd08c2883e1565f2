"""Serve other processes of ours, and connect to them, on this host and, if configured, on other hosts.

Each process opens this once. Without settings, it uses only the run directory. A process on another host is served by
the role in its certificate, within that role's rules.
"""

import asyncio
import datetime
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.errors import NotFound
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, problem_details
from kelvin.contracts.roles import Role, Rules, role_may_call
from kelvin.contracts.setting_parser import BadSetting
from kelvin.crypto.tls_identity import TlsIdentity, peer_role
from kelvin.ipc.connector import ConnectorFactory
from kelvin.ipc.health_port import serve_health
from kelvin.ipc.peer_settings import HEALTH_VARIABLE, PeerSettings, listener_url, load_identity
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import listen
from kelvin.ipc.tls_acceptor import TlsAcceptor
from kelvin.process.loops import Loops, ready_while_loops_work
from kelvin.process.request_context import with_request_context
from kelvin.process.service_lifecycle import DRAIN_S, InnerProtocol, Server, serve_until, uvicorn_config

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
MAX_LOGGED_REFUSALS: Final = 256  # each refused route is logged once per role, up to this many


class RoleFilter:
    """An ASGI wrapper that answers 404 on routes that the caller's role may not call."""

    def __init__(self, app: ASGIApp, rules: Rules, role: Role, logged_refusals: set[tuple[Role, str]]) -> None:
        self._app = app
        self._rules = rules
        self._role = role
        self._logged_refusals = logged_refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        path: str = scope["path"]
        if role_may_call(self._rules, self._role, path):
            await self._app(scope, receive, send)
            return
        if (key := (self._role, path[:80])) not in self._logged_refusals and len(
            self._logged_refusals
        ) < MAX_LOGGED_REFUSALS:
            self._logged_refusals.add(key)
            log.warning("this role may not call this route", extra={"role": str(self._role), "path": path[:80]})
        failure = NotFound("route", path[:80])
        headers = [(b"content-type", PROBLEM_CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await send({"type": "http.response.body", "body": problem_details(failure)})


async def serve_with_roles(
    app: ASGIApp,
    listener: socket.socket,
    tls: ssl.SSLContext,
    rules: Rules,
    stop: asyncio.Event,
    drain_s: int = DRAIN_S,
) -> None:
    """Serve HTTP/1.1 over `tls` (from `TlsIdentity.server`) until `stop`. Otherwise like `serve_until`."""
    await _Server(with_request_context(ready_while_loops_work(app)), listener, tls, rules, drain_s).serve_until(
        stop, []
    )


class _Server(Server):
    """A server whose connections come from a TlsAcceptor."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext, rules: Rules, drain_s: int) -> None:
        super().__init__(uvicorn_config(app, drain_s))
        logged_refusals: set[tuple[Role, str]] = set()
        self.config.load()

        def make() -> asyncio.Protocol:
            return _Connection(self, rules, logged_refusals)

        self._acceptor = TlsAcceptor(
            listener, tls, make,
            is_full=lambda: len(self.server_state.connections) >= MAX_CONNECTIONS, on_refused=_log_refusal,
        )  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptor.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        await super().shutdown(sockets)
        await self._acceptor.end()

    async def abort_connections(self, sockets: list[socket.socket]) -> None:
        if self.started:
            await self._acceptor.close()
        await super().abort_connections(sockets)
        await self._acceptor.end()


class _Connection(InnerProtocol):
    """A connection that knows the peer's role before its first request."""

    def __init__(self, server: _Server, rules: Rules, logged_refusals: set[tuple[Role, str]]) -> None:
        super().__init__(config=server.config, server_state=server.server_state, app_state={})
        self._rules = rules
        self._logged_refusals = logged_refusals

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        role = peer_role(transport.get_extra_info("ssl_object"))
        self.app = RoleFilter(self.app, self._rules, role, self._logged_refusals)


def _log_refusal(error: OSError | None) -> None:
    why = "too many connections" if error is None else f"{type(error).__name__}: {error}"
    log.warning("a connection was refused", extra={"why": why[:200]})


class InternalServer:
    """The listeners and connectors of one process. Made by `open_internal_server`."""

    def __init__(
        self,
        connector_factory: ConnectorFactory,
        identity: TlsIdentity | None,
        listener: socket.socket | None,
        health: socket.socket | None = None,
    ) -> None:
        self.connector_factory = connector_factory
        self.identity = identity
        self._listener = listener
        self._health = health
        # The URL at which other hosts reach this process.
        self.url = "" if listener is None else listener_url(*listener.getsockname()[:2])

    def __repr__(self) -> str:
        return f"<InternalServer {self.url or 'here'} {self.identity or 'alone'}>"

    def certificate_expiry(self) -> dict[str, datetime.datetime]:
        """Return when our certificate for other hosts expires, as `inner`. Empty without a certificate."""
        return {} if self.identity is None else {"inner": self.identity.expires_at}

    async def serve(
        self,
        app: ASGIApp,
        local_listener: socket.socket,
        rules: Rules,
        stop: asyncio.Event,
        drain_s: int = DRAIN_S,
        *,
        remote_app: ASGIApp | None = None,
    ) -> None:
        """Serve `app` until `stop`, then drain for at most `drain_s` seconds.

        Callers on this host reach all routes through `local_listener`. Other hosts reach the routes of `remote_app`
        (default: `app`) that `rules` allow for their role. The health port shows health and metrics to anybody.
        """
        async with asyncio.TaskGroup() as tasks:
            if self.identity is not None and self._listener is not None:
                tls = self.identity.server_context()
                tasks.create_task(serve_with_roles(remote_app or app, self._listener, tls, rules, stop, drain_s))
            if self._health is not None:
                tasks.create_task(serve_health(app, self._health, stop, drain_s))
            await serve_until(app, local_listener, stop, drain_s)


@asynccontextmanager
async def open_internal_server(
    directory: SocketDirectory, peer_settings: PeerSettings, role: Role, setting: str = "", *, pods: bool = False
) -> AsyncIterator[InternalServer]:
    """Open the sockets of a process, and reload its certificate when the files change, until the block ends.

    It listens at once, and answers once `InternalServer.serve` runs. `setting` names the address in errors. With
    `pods`, pods of a cluster are reached over plain HTTP. Raises BadSetting.
    """
    async with AsyncExitStack() as stack:
        identity = listener = None
        health = (
            None
            if peer_settings.health is None
            else stack.enter_context(_listen(HEALTH_VARIABLE, *peer_settings.health))
        )
        if peer_settings.files is not None:
            identity = load_identity(peer_settings.files, role)
            listener = (
                None if peer_settings.listen is None else stack.enter_context(_listen(setting, *peer_settings.listen))
            )
            loops = await stack.enter_async_context(Loops())
            loops.start("identity", identity.reload_forever)
        yield InternalServer(ConnectorFactory(directory, identity, pods=pods), identity, listener, health)


def _listen(setting: str, host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        rule = f"can't be listened on: {error.strerror or os.strerror(error.errno or 0)}"
        raise BadSetting(setting, f"{host}:{port}", rule) from error
