"""Nodes with a shared secret can connect, and others can't. A bad secrets file is refused with the rule."""

import socket
import ssl
import threading
from pathlib import Path

import pytest

from kelvin.crypto.node_tls import NodeTls, read_secrets

ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


def speaks(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Return whether a byte gets from the server to the client."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as sock:
                sock.sendall(b"x")
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as sock:
            return sock.recv(1) == b"x"
    except OSError:
        theirs.close()
        return False
    finally:
        thread.join(10)


@pytest.mark.parametrize(
    ("server", "client", "want"),
    [
        pytest.param([ONE], [ONE], True, id="the same secret"),
        pytest.param([ONE], [TWO], False, id="different secrets"),
        pytest.param([ONE, TWO], [ONE], True, id="the server also knows the next secret"),
        pytest.param([TWO, ONE], [ONE, TWO], True, id="the server already uses the next secret"),
        pytest.param([TWO], [ONE, TWO], False, id="the server dropped the secret that the client uses"),
        pytest.param([TWO, THREE], [THREE, TWO], True, id="a second rotation"),
    ],
)
def test_nodes_need_a_shared_secret(server: list[bytes], client: list[bytes], want: bool) -> None:
    """Each side must know the secret that the other side uses."""
    assert speaks(NodeTls(server).server_context(), NodeTls(client).client_context()) is want


def test_a_client_without_certificate() -> None:
    """A client without a certificate is refused, even if it accepts any server."""
    trusting_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting_client.check_hostname, trusting_client.verify_mode = False, ssl.CERT_NONE
    assert not speaks(NodeTls([ONE]).server_context(), trusting_client)
    lenient = NodeTls([ONE]).server_context()
    lenient.verify_mode = ssl.CERT_NONE
    assert speaks(lenient, trusting_client), "the control: a server that asks for none would answer"


def test_secrets_are_read_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\n" + ONE + b"\n  " + TWO + b"\r\n")
    path.chmod(0o640)
    assert read_secrets(path) == (ONE, TWO)


@pytest.mark.parametrize(
    ("content", "mode", "rule"),
    [
        pytest.param(b"", 0o600, "1 to 4 secrets", id="empty"),
        pytest.param(b"\n".join([ONE] * 5), 0o600, "1 to 4 secrets", id="too many"),
        pytest.param(b"short", 0o600, "32 characters", id="too short"),
        pytest.param(ONE, 0o604, "every user", id="readable by all"),
    ],
)
def test_bad_secret_file_is_refused(tmp_path: Path, content: bytes, mode: int, rule: str) -> None:
    """The error states the rule and doesn't show the file's content."""
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ValueError, match=rule) as error:
        read_secrets(path)
    assert not content or content.decode()[:5] not in str(error.value)
