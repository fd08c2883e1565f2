"""Client of a zygote: one SEQPACKET message out, one back, with a pidfd.

Each request uses a connection of its own: the zygote may be replaced at any time, and a fork costs much more.
"""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kelvin.contracts.errors import Internal, Refused, Unavailable
from kelvin.contracts.problem import WireFailure, from_wire
from kelvin.contracts.wire import Wire, decode, encode
from kelvin.ipc.forked_process import socket_name
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid

ZYGOTE_SOCKET: Final = "zygote.sock"
PEER: Final = "the zygote"
_MAX_MESSAGE: Final = 4096
_CONNECT_S: Final = 1.0  # connecting blocks the event loop, but a listening zygote accepts at once


@dataclass(frozen=True, slots=True)
class ForkResult:
    """A forked process that parks. The holder closes `pidfd`."""

    pid: int
    pidfd: int


class _Reply(Wire, frozen=True):
    ok: bool
    pid: int | None = None
    threads: int | None = None
    failure: WireFailure | None = None


class ZygoteClient:
    """Sends requests to a zygote. `pid` is the process that answered last, as the kernel knows it."""

    def __init__(self, directory: SocketDirectory, name: str = ZYGOTE_SOCKET) -> None:
        self._directory = directory
        self._name = name
        self.pid: int | None = None

    async def fork(self, runtime_id: str, timeout_s: float) -> ForkResult:
        """Fork a standby. Raises Refused: Unavailable, or the zygote's reason. If cancelled, kills the new standby."""
        exchange = asyncio.ensure_future(self._exchange({"op": "fork", "runtime_id": runtime_id}, timeout_s))
        try:
            await asyncio.wait({exchange})
        except asyncio.CancelledError:
            socket_path = self._directory.path / socket_name(runtime_id)
            exchange.add_done_callback(partial(_kill_unclaimed, socket_path))
            raise
        reply, fds = exchange.result()
        if reply.pid is None or len(fds) != 1:
            _close(fds)
            raise Refused(Internal())
        return ForkResult(reply.pid, fds[0])

    async def ping(self, timeout_s: float) -> None:
        """Raise Refused(Unavailable) if the zygote does not answer."""
        _, fds = await self._exchange({"op": "ping"}, timeout_s)
        _close(fds)

    async def _exchange(self, request: dict[str, str], timeout_s: float) -> tuple[_Reply, list[int]]:
        loop = asyncio.get_running_loop()
        try:
            sock = self._directory.connect(self._name, socket.SOCK_SEQPACKET, timeout_s=_CONNECT_S)
        except OSError as error:
            self.pid = None
            raise Refused(Unavailable(PEER)) from error
        fds: list[int] = []
        readable = asyncio.Event()
        with sock:
            sock.setblocking(False)
            loop.add_reader(sock.fileno(), readable.set)
            try:
                sock.send(encode(request))
                async with asyncio.timeout(timeout_s):
                    await readable.wait()
                raw, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, 4)
                self.pid = peer_pid(sock)
            except OSError as error:  # TimeoutError is one
                raise Refused(Unavailable(PEER)) from error
            finally:
                loop.remove_reader(sock.fileno())
        for fd in fds:
            os.set_inheritable(fd, False)
        if not raw:
            _close(fds)
            raise Refused(Unavailable(PEER))
        try:
            reply = decode(raw, _Reply, field=f"answer of {PEER}")
        except Refused:
            _close(fds)
            raise
        if not reply.ok:
            _close(fds)
            raise Refused(from_wire(reply.failure) if reply.failure is not None else Internal())
        return reply, fds


def _kill_unclaimed(socket_path: Path, exchange: asyncio.Task[tuple[_Reply, list[int]]]) -> None:
    if exchange.cancelled() or exchange.exception() is not None:
        return
    _, fds = exchange.result()
    for fd in fds:
        with suppress(OSError):  # it is dead already, or this is no pidfd
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    _close(fds)
    socket_path.unlink(missing_ok=True)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
