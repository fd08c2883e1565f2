"""One process among the others: whom it reaches and who reaches it, on this host and, where settings say so, beyond.

A process opens this once. Without settings it is the run directory and nothing else.
"""

import asyncio
import datetime
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.types import ASGIApp

from contracts.roles import Role, Rules
from contracts.settings import BadSetting
from service.by_role import serve_by_role
from service.health_port import serve_health
from service.identity import Identity
from service.inner_settings import HEALTH, Between, identity_of, url_of
from service.listener import listen
from service.loops import Loops
from service.run import DRAIN_S, serve_until
from service.unix import SocketDirectory
from service.way import Ways


class Inner:
    """See `open_inner`."""

    def __init__(
        self,
        ways: Ways,
        identity: Identity | None,
        listener: socket.socket | None,
        health: socket.socket | None = None,
    ) -> None:
        self.ways = ways
        self.identity = identity
        self._listener = listener
        self._health = health
        self.url = "" if listener is None else url_of(*listener.getsockname()[:2])  # where other hosts reach us

    def __repr__(self) -> str:
        return f"<Inner {self.url or 'here'} {self.identity or 'alone'}>"

    def ends(self) -> dict[str, datetime.datetime]:
        """Until when we are known to other hosts, as `inner`; nothing where we have no certificate."""
        return {} if self.identity is None else {"inner": self.identity.ends}

    async def serve(
        self,
        app: ASGIApp,
        here: socket.socket,
        rules: Rules,
        stop: asyncio.Event,
        drain_s: int = DRAIN_S,
        *,
        beyond: ASGIApp | None = None,
    ) -> None:
        """Serve `app` until `stop`, then drain for at most `drain_s` seconds.

        This host gets all of it through `here`. Other hosts get the routes that `rules` allow for their role, of
        `beyond` if it is given. The health port shows health and metrics to anybody.
        """
        async with asyncio.TaskGroup() as tasks:
            if self.identity is not None and self._listener is not None:
                tls = self.identity.server()
                tasks.create_task(serve_by_role(beyond or app, self._listener, tls, rules, stop, drain_s))
            if self._health is not None:
                tasks.create_task(serve_health(app, self._health, stop, drain_s))
            await serve_until(app, here, stop, drain_s)


@asynccontextmanager
async def open_inner(
    directory: SocketDirectory, between: Between, role: Role, setting: str = "", *, pods: bool = False
) -> AsyncIterator[Inner]:
    """Open the sockets of a process, and follow the files of its certificate until the block is left.

    It listens at once, and answers once `Inner.serve` runs. `setting` names the address in errors. With `pods`, pods of
    a cluster are reached over plain HTTP. Raises BadSetting.
    """
    async with AsyncExitStack() as stack:
        identity = listener = None
        health = None if between.health is None else stack.enter_context(_listen(HEALTH, *between.health))
        if between.files is not None:
            identity = identity_of(between.files, role)
            listener = None if between.listen is None else stack.enter_context(_listen(setting, *between.listen))
            loops = await stack.enter_async_context(Loops())
            loops.start("identity", identity.follow)
        yield Inner(Ways(directory, identity, pods=pods), identity, listener, health)


def _listen(setting: str, host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        rule = f"can't be listened on: {error.strerror or os.strerror(error.errno or 0)}"
        raise BadSetting(setting, f"{host}:{port}", rule) from error
