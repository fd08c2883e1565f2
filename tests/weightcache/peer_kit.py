"""Helpers for tests of peers: agents that are peers of each other, and fake nodes with chosen answers."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kelvin.blobstore.file_store import FileStore
from kelvin.crypto.node_tls import NodeTls
from tests.loop_thread import HOST, Answer, running_http_server
from tests.weightcache.kit import CountingStore, RunningAgent, run_agent, settings_of
from weightcache.app.settings import CacheSettings, PeerSettings
from weightcache.sources.source import Verify, is_digest_of

SECRET = b"0123456789abcdef" * 4


def url_of(port: int) -> str:
    return f"https://{HOST}:{port}"


def peer_settings_of(root: Path, port: int, others: list[int], secret: bytes = SECRET) -> CacheSettings:
    """Return settings of an agent that listens at `port` and has peers at the ports `others`."""
    peers = PeerSettings((HOST, port), tuple(url_of(other) for other in others), (secret,))
    return replace(settings_of(root), peers=peers)


@contextmanager
def node(
    root: Path, port: int, others: list[int], *, store: Path, secret: bytes = SECRET, verify: Verify = is_digest_of
) -> Iterator[tuple[RunningAgent, CountingStore]]:
    """Run an agent over the common store. Yield it and a record of its reads from the store."""
    counting = CountingStore(FileStore(store))
    with run_agent(peer_settings_of(root, port, others, secret), counting, verify=verify) as agent:
        yield agent, counting


@contextmanager
def run_fake_peer(answer: Answer, secret: bytes = SECRET) -> Iterator[int]:
    """Run a fake node with the same secret and these answers. Yields its port."""
    with running_http_server(answer, NodeTls([secret]).server_context()) as port:
        yield port


def connect(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Return a TLS connection made with `context`."""
    sock = socket.create_connection((HOST, port), 10)
    try:
        return context.wrap_socket(sock, server_hostname=HOST)
    except BaseException:
        sock.close()
        raise


def ask(port: int, request: str, context: ssl.SSLContext | None = None) -> bytes:
    """Return all bytes of the answer to one request; empty if the connection is refused."""
    found = b""
    with suppress(OSError), connect(port, context or NodeTls([SECRET]).client_context()) as sock:
        sock.sendall(request.encode())
        while piece := sock.recv(65536):
            found += piece
    return found
