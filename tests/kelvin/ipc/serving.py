"""Serve an application on a socket, with a client, for the duration of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.service_lifecycle import serve_until


@dataclass(frozen=True, slots=True)
class Served:
    """A running service. `stop` starts the drain of at most a second, after which `serving` is done."""

    socket: Path
    client: ServiceClient
    stop: asyncio.Event
    serving: "asyncio.Task[None]"


@asynccontextmanager
async def served(tmp_path: Path, app: ASGIApp) -> AsyncIterator[Served]:
    """Serve `app` until the block ends."""
    with closing(SocketDirectory(tmp_path / "run")) as directory, directory.listen("s.sock") as listener:
        stop = asyncio.Event()
        serving = asyncio.create_task(serve_until(app, listener, stop, 1))
        client = ServiceClient(directory, "s.sock", "the service")
        try:
            yield Served(directory.path / "s.sock", client, stop, serving)
        finally:
            await client.close()
            stop.set()
            await serving
