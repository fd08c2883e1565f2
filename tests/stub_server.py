"""Serve a fake on a Unix socket or a port. Its stop loses no connection that is being accepted."""

import asyncio
import socket
from pathlib import Path

from aiohttp import web


class StubServer:
    """An aiohttp application at a path, or at a port of this machine.

    asyncio before 3.12 breaks, unclosed, a connection whose server closes between the accept and its transport
    (https://github.com/python/cpython/issues/109564): so `stop` accepts no more, lets those on the way arrive,
    and closes then.
    """

    def __init__(self, app: web.Application, shutdown_s: float = 0.05) -> None:
        self._runner = web.AppRunner(app, shutdown_timeout=shutdown_s, handler_cancellation=True)

    async def start(self, path: Path) -> None:
        """Listen at `path`, and replace what is there."""
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        await self._serve()

    async def start_at(self, held: socket.socket | None = None) -> int:
        """Listen at a free port, or at the one of `held` (see `reserve_port`). Return the port."""
        self._socket = held or reserve_port()
        await self._serve()
        chosen: int = self._socket.getsockname()[1]
        return chosen

    async def stop(self) -> None:
        """Stop listening, and close every connection."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        await asyncio.sleep(0)  # the transports of what was accepted are made,
        await asyncio.sleep(0)  # and told of their protocols
        await self._runner.cleanup()

    async def _serve(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()


def reserve_port() -> socket.socket:
    """A port of this machine that is ours from now on, and refuses connections until somebody listens there."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
