"""A closed TLS port leaves no connection open, whatever its clients do."""

import asyncio
import errno
import socket
import ssl
from pathlib import Path

import pytest
import uvloop

from kelvin.contracts.roles import Role
from kelvin.crypto.tls_identity import TlsIdentity
from kelvin.ipc import tls_acceptor
from kelvin.ipc.tcp_listener import listen
from kelvin.ipc.tls_acceptor import TlsAcceptor
from tests.kelvin.crypto.pki import Authority, write

HOST = "127.0.0.1"


class Leaving(asyncio.Protocol):
    """A protocol that closes at once, which waits for the client's close_notify."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def count_open_descriptors(tmp_path: Path, *, ends: bool) -> int:
    """Return the number of descriptors still open after a client that never sends close_notify."""
    authority = Authority()
    server = TlsIdentity(write(tmp_path / "s", authority.of(Role.CONTROLPLANE), authority), Role.CONTROLPLANE)
    client = TlsIdentity(write(tmp_path / "c", authority.of(Role.ACTIVATOR), authority), Role.ACTIVATOR)
    listener = listen(HOST, 0)
    acceptor = TlsAcceptor(listener, server.server_context(), Leaving, is_full=lambda: False, on_refused=lambda _: None)
    acceptor.open()

    def handshake() -> tuple[socket.socket, ssl.SSLObject]:
        """Shake hands manually, so that no library replies afterwards."""
        sock = socket.create_connection(listener.getsockname()[:2])
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = client.client_context(Role.CONTROLPLANE).wrap_bio(incoming, outgoing)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                incoming.write(sock.recv(65536))
            else:
                sock.sendall(outgoing.read())
                return sock, tls

    sock, _ = await asyncio.to_thread(handshake)
    try:
        while not (known := list(acceptor._open)):
            await asyncio.sleep(0.001)
        await acceptor.close()
        if ends:
            await acceptor.end()
        return sum(each.fileno() >= 0 for each in known)
    finally:
        sock.close()
        await acceptor.end()


@pytest.mark.parametrize(("ends", "left"), [(True, 0), (False, 1)])
def test_connection_without_close_notify_is_cut(tmp_path: Path, ends: bool, left: int) -> None:
    """The connection is closed with the server, not two seconds later without a loop. Control: it waits for
    close_notify."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(count_open_descriptors(tmp_path, ends=ends)) == left


class Exhausted(socket.socket):
    """A listener in a process without free descriptors."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        raise OSError(errno.EMFILE, "too many open files")


async def test_failed_accepts_are_logged_less_and_less(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without descriptors retries ten times a second. A log line for each would fill the log."""
    monkeypatch.setattr(tls_acceptor, "ACCEPT_PAUSE_S", 0.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    acceptor = TlsAcceptor(Exhausted(), context, Leaving, is_full=lambda: False, on_refused=lambda _: None)
    acceptor.open()
    while acceptor._listener.tries < 9:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    await acceptor.close()
    failure_counts = [getattr(each, "failures", 0) for each in caplog.records if each.message == "accept failed"]
    assert failure_counts[:4] == [1, 2, 4, 8]
