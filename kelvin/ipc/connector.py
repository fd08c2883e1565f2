"""Connect to another process of ours, wherever it runs.

An address is a socket in the run directory, or https://HOST:PORT with mutual TLS and roles. Pods of a cluster may also
have http://HOST:PORT, if the factory allows it. Only this module turns addresses into connections, and its users don't
see the difference.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp

from kelvin.contracts.roles import Role
from kelvin.crypto.tls_identity import TlsIdentity
from kelvin.ipc.peer_settings import PLAIN, REMOTE
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import enable_keepalive

P = TypeVar("P", bound=asyncio.Protocol)

HANDSHAKE_S: Final = 5.0


class Connector(Protocol):
    """Connects to one process, with any number of connections. Connecting raises OSError."""

    @property
    def base_url(self) -> str:
        """The prefix of URLs to this process."""
        ...

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Open one connection. Safe to cancel."""
        ...

    def aiohttp_connector(self, limit: int) -> aiohttp.BaseConnector:
        """Return an aiohttp connector for one session. `limit` bounds its connections; 0: no limit."""
        ...


class SocketConnector:
    """Connects to a Unix socket by its path."""

    base_url = "http://kelvin"

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<SocketConnector {self._path}>"

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Open one connection. Safe to cancel. Raises OSError."""
        _, made = await asyncio.get_running_loop().create_unix_connection(protocol, self._path)
        return made

    def aiohttp_connector(self, limit: int) -> aiohttp.BaseConnector:
        """Return an aiohttp connector for one session."""
        return aiohttp.UnixConnector(path=self._path, limit=limit)


class HostConnector:
    """Connects to https://HOST:PORT with `tls`, or to http:// without. The name is resolved for each connection."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self.base_url = url
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._tls = tls

    def __repr__(self) -> str:
        return f"<HostConnector {self.base_url}>"

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Open one connection. Safe to cancel. Raises OSError."""
        try:
            transport, made = await asyncio.get_running_loop().create_connection(
                protocol,
                self._host,
                self._port,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )
        except UnicodeError as error:  # an invalid host name
            raise OSError(f"{self.base_url}: {error}") from error
        enable_keepalive(transport.get_extra_info("socket"))
        return made

    def aiohttp_connector(
        self, limit: int, on_socket: Callable[[socket.socket], None] | None = None
    ) -> aiohttp.BaseConnector:
        """Return an aiohttp connector for one session. `on_socket` gets each socket that it makes, connected or not."""

        def make(found: aiohttp.AddrInfoType) -> socket.socket:
            sock = _socket(found)
            if on_socket is not None:
                on_socket(sock)
            return sock

        tls = True if self._tls is None else self._tls
        made = aiohttp.TCPConnector(ssl=tls, limit=limit, use_dns_cache=False, socket_factory=make)
        if self._tls is not None:
            made.allowed_protocol_schema_set = frozenset({"https"})  # no redirect can make a session use plain HTTP
        return made


class ConnectorFactory:
    """Makes the connectors of one process. Without `identity`, it reaches only processes on this host. With `pods`, it
    also accepts http://, because Knative's queue-proxies speak nothing else.
    """

    def __init__(self, directory: SocketDirectory, identity: TlsIdentity | None = None, *, pods: bool = False) -> None:
        self._directory = directory
        self._pods = pods
        self._contexts = {} if identity is None else {role: identity.client_context(role) for role in Role}

    def __repr__(self) -> str:
        return f"<ConnectorFactory {self._directory.path} {'and hosts' if self._contexts else 'alone'}>"

    def connector_to(self, address: str, role: Role) -> Connector:
        """Return a connector to a socket name or URL, whose process must have this role. Raises ValueError."""
        if address.startswith(PLAIN):
            if not self._pods:
                raise ValueError(f"{address}: must be https://")
            return HostConnector(address, None)
        if not address.startswith(REMOTE):
            return SocketConnector(self._directory.address(address))
        if role not in self._contexts:
            raise ValueError(f"{address}: no certificate for other hosts")
        return HostConnector(address, self._contexts[role])


def _socket(found: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = found
    made = socket.socket(family, kind, protocol)
    try:
        enable_keepalive(made)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made
