"""The way to a process of ours, wherever it is: a socket of the run directory, or https://HOST:PORT with roles; to
a pod of a cluster also http://HOST:PORT, where whoever opens the ways says so.

The one place where an address becomes connections. Who uses a way does not know which of the two it is.
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
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import enable_keepalive

P = TypeVar("P", bound=asyncio.Protocol)

REMOTE: Final = "https://"
PLAIN: Final = "http://"
HANDSHAKE_S: Final = 5.0


class Connector(Protocol):
    """To one process, over any number of connections. Connecting raises OSError."""

    @property
    def base_url(self) -> str:
        """What URLs begin with."""
        ...

    async def connect(self, protocol: Callable[[], P]) -> P:
        """One connection. Safe to cancel."""
        ...

    def connector(self, limit: int) -> aiohttp.BaseConnector:
        """For a session of its own; 0: as many connections as it likes."""
        ...


class SocketConnector:
    """By a Unix socket's path."""

    base_url = "http://kelvin"

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<SocketConnector {self._path}>"

    async def connect(self, protocol: Callable[[], P]) -> P:
        """See Way."""
        _, made = await asyncio.get_running_loop().create_unix_connection(protocol, self._path)
        return made

    def connector(self, limit: int) -> aiohttp.BaseConnector:
        """See Way."""
        return aiohttp.UnixConnector(path=self._path, limit=limit)


class HostConnector:
    """By https://HOST:PORT, which `tls` speaks to, or by http:// without. A name is looked up for each connection."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self.base_url = url
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._tls = tls

    def __repr__(self) -> str:
        return f"<HostConnector {self.base_url}>"

    async def connect(self, protocol: Callable[[], P]) -> P:
        """See Way."""
        try:
            transport, made = await asyncio.get_running_loop().create_connection(
                protocol,
                self._host,
                self._port,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            )
        except UnicodeError as error:  # of a name that is none
            raise OSError(f"{self.base_url}: {error}") from error
        enable_keepalive(transport.get_extra_info("socket"))
        return made

    def connector(self, limit: int, told: Callable[[socket.socket], None] | None = None) -> aiohttp.BaseConnector:
        """See Way. Of each socket that it makes, connected or not, somebody may be told."""

        def make(found: aiohttp.AddrInfoType) -> socket.socket:
            line = _socket(found)
            if told is not None:
                told(line)
            return line

        tls = True if self._tls is None else self._tls
        made = aiohttp.TCPConnector(ssl=tls, limit=limit, use_dns_cache=False, socket_factory=make)
        if self._tls is not None:
            made.allowed_protocol_schema_set = frozenset({"https"})  # a session can't be talked into speaking openly
        return made


class ConnectorFactory:
    """What one process reaches others by. Where `identity` is None, only what is on this host; with `pods` also what
    says http://, since queue-proxies speak nothing else.
    """

    def __init__(self, directory: SocketDirectory, identity: TlsIdentity | None = None, *, pods: bool = False) -> None:
        self._directory = directory
        self._pods = pods
        self._contexts = {} if identity is None else {role: identity.client(role) for role in Role}

    def __repr__(self) -> str:
        return f"<ConnectorFactory {self._directory.path} {'and hosts' if self._contexts else 'alone'}>"

    def to(self, address: str, role: Role) -> Connector:
        """A name in the run directory, or a URL, behind which a process of that role has to be. Raises ValueError."""
        if address.startswith(PLAIN):
            if not self._pods:
                raise ValueError(f"{address}: must be https://")
            return HostConnector(address, None)
        if not address.startswith(REMOTE):
            return SocketConnector(self._directory.address(address))
        if role not in self._contexts:
            raise ValueError(f"{address}: no certificate for other hosts")
        return HostConnector(address, self._contexts[role])


def is_remote(address: str) -> bool:
    """Whether that is on another host."""
    return address.startswith((REMOTE, PLAIN))


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
