"""What the tests of peers share: agents that know one another, and a node that behaves as a test wants it to."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kelvin.blobstore.file_store import FileStore
from kelvin.crypto.node_tls import NodeTls
from tests.loop_thread import HOST, Answer, running_http_server
from tests.weightcache.kit import CountingStore, RunningAgent, running, settings_of
from weightcache.app.settings import CacheSettings, PeerSettings
from weightcache.sources.source import Verify, is_digest_of

SECRET = b"0123456789abcdef" * 4


def url_of(port: int) -> str:
    return f"https://{HOST}:{port}"


def peered(root: Path, port: int, others: list[int], secret: bytes = SECRET) -> CacheSettings:
    """Settings of an agent that is asked at `port` and asks those at `others`."""
    peers = PeerSettings((HOST, port), tuple(url_of(other) for other in others), (secret,))
    return replace(settings_of(root), peers=peers)


@contextmanager
def node(
    root: Path, port: int, others: list[int], *, store: Path, secret: bytes = SECRET, verify: Verify = is_digest_of
) -> Iterator[tuple[RunningAgent, CountingStore]]:
    """An agent over the common store, and its own count of what it read there."""
    counting = CountingStore(FileStore(store))
    with running(peered(root, port, others, secret), counting, verify=verify) as agent:
        yield agent, counting


@contextmanager
def pretender(answer: Answer, secret: bytes = SECRET) -> Iterator[int]:
    """A node of the same secret that answers so. Yields its port."""
    with running_http_server(answer, NodeTls([secret]).server()) as port:
        yield port


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection as `context` makes one."""
    sock = socket.create_connection((HOST, port), 10)
    try:
        return context.wrap_socket(sock, server_hostname=HOST)
    except BaseException:
        sock.close()
        raise


def ask(port: int, request: str, context: ssl.SSLContext | None = None) -> bytes:
    """All that comes back for one request, after which the connection ends; nothing where it is refused before."""
    found = b""
    with suppress(OSError), connected(port, context or NodeTls([SECRET]).client()) as sock:
        sock.sendall(request.encode())
        while piece := sock.recv(65536):
            found += piece
    return found
