"""TLS between hosts: which peers accept each other, and what happens when the files change."""

import asyncio
import contextlib
import datetime
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from kelvin.contracts.roles import Role
from kelvin.crypto.tls_identity import BadIdentity, IdentityFiles, TlsIdentity, peer_role
from tests.kelvin.crypto.pki import HOUR, PREFIX, Authority, Pair, write

HERE = "127.0.0.3"
ONE, TWO = Authority("one"), Authority("two")


@contextlib.asynccontextmanager
async def role_server(tls: ssl.SSLContext) -> AsyncIterator[int]:
    """Run a server that sends each client the role that it sees. Yield its port."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(peer_role(writer.get_extra_info("ssl_object")).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(tell, HERE, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def receive_role(port: int, tls: ssl.SSLContext) -> str:
    """Return what the server sends, or nothing if the connection fails."""
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(HERE, port, ssl=tls)
            try:
                return (await reader.read()).decode()
            finally:
                writer.close()
    except OSError:
        return ""


def trusting_client(pair: Pair | None, tmp_path: Path) -> ssl.SSLContext:
    """Return a client context that accepts any server and presents `pair`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if pair is not None:
        (tmp_path / "both").write_bytes(pair.certificate + pair.key)
        made.load_cert_chain(tmp_path / "both")
    return made


@pytest.mark.uvloop
async def test_peers_learn_the_role_of_each_other(tmp_path: Path) -> None:
    """The server accepts the client and sees its role."""
    control = TlsIdentity(write(tmp_path / "c", ONE.of(Role.CONTROLPLANE), ONE), Role.CONTROLPLANE)
    activator = TlsIdentity(write(tmp_path / "a", ONE.of(Role.ACTIVATOR), ONE), Role.ACTIVATOR)
    async with role_server(control.server_context()) as port:
        assert await receive_role(port, activator.client_context(Role.CONTROLPLANE)) == "activator"


@pytest.mark.uvloop
@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(lambda: None, id="no certificate"),
        pytest.param(lambda: TWO.of(Role.ACTIVATOR), id="another authority's certificate"),
        pytest.param(lambda: ONE.sign(), id="no role"),
        pytest.param(lambda: ONE.sign("spiffe://kelvin/intern"), id="an unknown role"),
        pytest.param(lambda: ONE.sign("spiffe://elsewhere/activator"), id="another installation's role"),
        pytest.param(lambda: ONE.sign("spiffe://kelvin/x/activator"), id="a role deeper down"),
        pytest.param(lambda: ONE.sign(PREFIX + "activator", PREFIX + "runtime"), id="two roles"),
        pytest.param(lambda: ONE.sign(PREFIX + "activator", ends_in=-HOUR), id="expired"),
        pytest.param(
            lambda: ONE.sign(PREFIX + "activator", usages=(ExtendedKeyUsageOID.SERVER_AUTH,)), id="for servers alone"
        ),
    ],
)
async def test_client_without_a_role_is_refused(shown: Callable[[], Pair | None], tmp_path: Path) -> None:
    """A client without a valid role certificate gets no response. The same client with a valid certificate does."""
    control = TlsIdentity(write(tmp_path / "c", ONE.of(Role.CONTROLPLANE), ONE), Role.CONTROLPLANE)
    async with role_server(control.server_context()) as port:
        assert await receive_role(port, trusting_client(shown(), tmp_path)) == ""
        assert await receive_role(port, trusting_client(ONE.of(Role.RUNTIME), tmp_path)) == "runtime"


@pytest.mark.uvloop
@pytest.mark.parametrize(
    "role",
    [pytest.param(role, id=f"a {role} in place of the control plane") for role in Role if role != "controlplane"],
)
async def test_client_refuses_a_server_of_another_role(role: Role, tmp_path: Path) -> None:
    """A client of the control plane sends nothing to a server with another role's certificate."""
    other = TlsIdentity(write(tmp_path / "c", ONE.of(role), ONE), role)
    activator = TlsIdentity(write(tmp_path / "a", ONE.of(Role.ACTIVATOR), ONE), Role.ACTIVATOR)
    async with role_server(other.server_context()) as port:
        assert await receive_role(port, activator.client_context(Role.CONTROLPLANE)) == ""
        assert await receive_role(port, activator.client_context(role)) == "activator"


@pytest.mark.uvloop
async def test_clients_keep_working_while_the_authority_is_replaced(tmp_path: Path) -> None:
    """Clients keep working while the authority is replaced: first the bundle, then the leaves, last the removal of the
    old one. Only then is a client with an old certificate refused."""
    there, here = tmp_path / "c", tmp_path / "a"
    control = TlsIdentity(write(there, ONE.of(Role.CONTROLPLANE), ONE), Role.CONTROLPLANE)
    activator = TlsIdentity(write(here, ONE.of(Role.ACTIVATOR), ONE), Role.ACTIVATOR)
    old = trusting_client(ONE.of(Role.RUNTIME), tmp_path)
    client = activator.client_context(Role.CONTROLPLANE)
    async with role_server(control.server_context()) as port:
        for of_control, of_activator, bundle in (
            (ONE, ONE, (ONE, TWO)),
            (ONE, TWO, (ONE, TWO)),
            (TWO, TWO, (TWO, ONE)),
            (TWO, TWO, (TWO,)),
        ):
            write(there, of_control.of(Role.CONTROLPLANE), *bundle)
            write(here, of_activator.of(Role.ACTIVATOR), *bundle)
            assert await receive_role(port, old) == "runtime"  # the server has not reloaded its files yet
            await control.reload()
            assert await receive_role(port, client) == "activator"
            await activator.reload()
            assert await receive_role(port, client) == "activator"
            if ONE not in bundle:
                assert await receive_role(port, old) == ""


def _cut(files: IdentityFiles) -> None:
    files.certificate.write_bytes(files.certificate.read_bytes()[:-100])


@pytest.mark.uvloop
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(_cut, id="half a certificate"),
        pytest.param(lambda files: files.key.write_bytes(files.key.read_bytes()[:80]), id="half a key"),
        pytest.param(lambda files: files.key.write_bytes(ONE.of(Role.ACTIVATOR).key), id="another certificate's key"),
        pytest.param(lambda files: files.key.unlink(), id="no key"),
        pytest.param(lambda files: files.authorities.write_bytes(b""), id="no authority"),
        pytest.param(lambda files: files.authorities.write_bytes(TWO.pem[:-40]), id="half an authority"),
        pytest.param(lambda files: write(files.key.parent, ONE.of(Role.RUNTIME), ONE), id="another role's"),
        pytest.param(
            lambda files: write(files.key.parent, ONE.sign(PREFIX + "activator", ends_in=-HOUR), ONE), id="expired"
        ),
        pytest.param(
            lambda files: write(files.key.parent, ONE.sign(PREFIX + "activator", repeats_names=True), ONE),
            id="an extension twice",
        ),
    ],
)
async def test_unusable_files_keep_the_old_identity(
    harm: Callable[[IdentityFiles], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The old identity stays in use, with one log line. A process doesn't start with such files. Valid ones are
    used."""
    control = TlsIdentity(write(tmp_path / "c", ONE.of(Role.CONTROLPLANE), ONE), Role.CONTROLPLANE)
    files = write(tmp_path / "a", ONE.of(Role.ACTIVATOR), ONE)
    activator = TlsIdentity(files, Role.ACTIVATOR)
    before = repr(activator)
    async with role_server(control.server_context()) as port:
        harm(files)
        with caplog.at_level(logging.INFO, "kelvin.crypto.tls_identity"):
            await activator.reload()
            await activator.reload()
        assert [record.message for record in caplog.records] == ["keeping the current certificate"]
        assert "PRIVATE" not in caplog.text
        assert repr(activator) == before
        assert await receive_role(port, activator.client_context(Role.CONTROLPLANE)) == "activator"
        with pytest.raises(BadIdentity):
            TlsIdentity(files, Role.ACTIVATOR)
        write(tmp_path / "a", ONE.of(Role.ACTIVATOR), ONE)
        await activator.reload()
        assert repr(activator) != before


def test_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    """OpenSSL would ask for the password at the terminal, so a start there would wait forever."""
    files = write(tmp_path, ONE.of(Role.ACTIVATOR), ONE)
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(BadIdentity, match="the key is encrypted: it must have no password"):
        TlsIdentity(files, Role.ACTIVATOR)


@pytest.mark.uvloop
async def test_future_certificate_waits_until_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A running process keeps its certificate until the new one is valid for peers. A starting process uses it."""
    files = write(tmp_path, ONE.of(Role.ACTIVATOR), ONE)
    activator = TlsIdentity(files, Role.ACTIVATOR)
    before, ends = repr(activator), activator.expires_at
    assert HOUR * 0.9 < ends - datetime.datetime.now(datetime.UTC) <= HOUR
    write(tmp_path, ONE.sign(PREFIX + "activator", begins_in=HOUR, ends_in=2 * HOUR), ONE)
    await activator.reload()
    assert (repr(activator), activator.expires_at) == (before, ends)
    assert "is not valid before" in str(vars(caplog.records[-1])["why"])
    assert repr(TlsIdentity(files, Role.ACTIVATOR)) != before


@pytest.mark.uvloop
async def test_failed_read_is_retried_at_the_next_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process has no free file descriptor, the certificate is kept and the next reload reads the new files."""
    files = write(tmp_path, ONE.of(Role.ACTIVATOR), ONE)
    activator = TlsIdentity(files, Role.ACTIVATOR)
    before = repr(activator)
    write(tmp_path, ONE.of(Role.ACTIVATOR), ONE)

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor")

    with monkeypatch.context() as patched:
        patched.setattr("os.memfd_create", none_left)
        await activator.reload()
    assert repr(activator) == before
    await activator.reload()
    assert repr(activator) != before


def test_a_certificate_that_is_about_to_expire(tmp_path: Path) -> None:
    """A certificate is used until it expires: a late renewal is no reason to stop earlier."""
    pair = ONE.sign(PREFIX + "activator", ends_in=datetime.timedelta(minutes=1))
    assert "activator" in repr(TlsIdentity(write(tmp_path, pair, ONE), Role.ACTIVATOR))


def test_blocking_socket_is_refused(tmp_path: Path) -> None:
    """A blocking socket would not check the peer's role."""
    identity = TlsIdentity(write(tmp_path, ONE.of(Role.ACTIVATOR), ONE), Role.ACTIVATOR)
    with socket.socket() as sock, pytest.raises(NotImplementedError, match="would not check the peer's role"):
        identity.server_context().wrap_socket(sock)
