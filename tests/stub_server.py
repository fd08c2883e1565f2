"""Serve a fake on a Unix socket or a port. `stop` loses no connection that is being accepted."""

import asyncio
import socket
from pathlib import Path

from aiohttp import web


class StubServer:
    """An aiohttp application on a Unix socket, or on a local port.

    Before Python 3.12, asyncio leaks a connection whose server closes between accept and transport
    (https://github.com/python/cpython/issues/109564). So `stop` first stops accepting, lets pending connections arrive,
    and then closes.
    """

    def __init__(self, app: web.Application, shutdown_s: float = 0.05) -> None:
        self._runner = web.AppRunner(app, shutdown_timeout=shutdown_s, handler_cancellation=True)

    async def start(self, path: Path) -> None:
        """Listen at `path`, replacing an existing file."""
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        await self._serve()

    async def start_at(self, held: socket.socket | None = None) -> int:
        """Listen on a free port, or on the one that `held` reserves (see `reserve_port`). Return the port."""
        self._socket = held or reserve_port()
        await self._serve()
        chosen: int = self._socket.getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Stop listening, and close every connection."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        await asyncio.sleep(0)  # accepted connections get their transports,
        await asyncio.sleep(0)  # and the transports call their protocols
        await self._runner.cleanup()

    async def _serve(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()


def reserve_port() -> socket.socket:
    """Reserve a local port. It refuses connections until a server listens on it."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
