"""A proxy in front of PostgreSQL. It adds TLS, drops messages and cuts connections.

It forwards bytes unchanged and never speaks the protocol itself.
"""

import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from enum import Enum, auto
from pathlib import Path
from types import TracebackType

from controlplane.db.postgres_url import PostgresUrl
from tests.controlplane.postgres_server import USER

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


class LostMessage(Enum):
    """The message that is lost at the next COMMIT."""

    ORDER = auto()  # the server never sees the COMMIT
    ANSWER = auto()  # the transaction commits, but the client gets no answer


class PostgresProxy:
    """A proxy on 127.0.0.1 in front of a server's socket. Leaving the block cuts every connection."""

    def __init__(self, server: Path, tls: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._tls = tls
        self._stack = ExitStack()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._pumps: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.lose_next: LostMessage | None = None
        self.refuses_connections = False  # new connections are closed at once

    def __enter__(self) -> "PostgresProxy":
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(30)
        self._listener.close()
        self.cut()
        for pump in self._pumps:
            pump.join(30)
        for each in self._sockets:
            each.close()

    def place(self, database: str, more: str = "") -> PostgresUrl:
        """Return the URL of a database behind the proxy, for `KELVIN_DATABASE`."""
        port = self._listener.getsockname()[1]
        return PostgresUrl(f"postgresql://{USER}@localhost:{port}/{database}?hostaddr=127.0.0.1{more}")

    def cut(self) -> None:
        """Cut every open connection."""
        for each in tuple(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses_connections:
                client.close()
                continue
            self._sockets.append(client)
            self._begin(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):  # the client breaks off its handshake, or the server is down
            if self._tls is not None:
                assert client.recv(len(_SSL_REQUEST)) == _SSL_REQUEST
                client.sendall(b"S")
                client = self._tls.wrap_socket(client, server_side=True)
                self._sockets.append(client)
            server = socket.socket(socket.AF_UNIX)
            self._sockets.append(server)
            server.connect(str(self._server / ".s.PGSQL.5432"))
            silenced = threading.Event()
            self._begin(self._pump_replies, server, client, silenced)
            self._pump_requests(client, server, silenced)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _pump_requests(self, client: socket.socket, server: socket.socket, silenced: threading.Event) -> None:
        while raw := client.recv(1 << 16):
            if b"COMMIT" in raw and self.lose_next is not None:
                lost, self.lose_next = self.lose_next, None
                if lost is LostMessage.ORDER:
                    break
                silenced.set()
            server.sendall(raw)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _pump_replies(self, server: socket.socket, client: socket.socket, silenced: threading.Event) -> None:
        with suppress(OSError):
            while (raw := server.recv(1 << 16)) and not silenced.is_set():
                client.sendall(raw)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _begin(self, target: object, *arguments: object) -> None:
        pump = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._pumps.append(pump)
        pump.start()
