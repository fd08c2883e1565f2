"""An httpx transport over a Unix socket. It closes sockets that fail to connect, which httpcore 1.0 leaves open."""

import select
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx


class UnixStream(httpcore.NetworkStream):
    """A connected blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            self._sock.settimeout(timeout)
            return self._sock.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout from error
        except OSError as error:
            raise httpcore.ReadError from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._sock.settimeout(timeout)
            self._sock.sendall(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout from error
        except OSError as error:
            raise httpcore.WriteError from error

    def close(self) -> None:
        self._sock.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return bool(select.select([self._sock], [], [], 0)[0])
        return None


class UnixBackend(httpcore.NetworkBackend):
    """Connects to Unix sockets only."""

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise httpcore.ConnectError(str(error)) from error
        return UnixStream(sock)


def unix_transport(path: str) -> httpx.HTTPTransport:
    """Return a transport to the socket at `path`."""
    transport = httpx.HTTPTransport()
    transport._pool = httpcore.ConnectionPool(uds=path, network_backend=UnixBackend(), max_connections=16)
    return transport
