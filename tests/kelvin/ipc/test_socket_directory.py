"""Sockets in a directory with a path of any length, and how a restart takes over a name."""

import socket
import threading
from pathlib import Path

import pytest

from kelvin.ipc.socket_directory import SocketDirectory


def test_a_directory_with_a_path_longer_than_an_address_works(tmp_path: Path) -> None:
    """A socket address holds 107 bytes; a directory's path may be longer."""
    directory = SocketDirectory(tmp_path / ("d" * 100) / ("e" * 100))
    listener = directory.listen("a.sock")

    def greet() -> None:
        with listener.accept()[0] as accepted:
            accepted.sendall(b"hello")

    echo = threading.Thread(target=greet)
    echo.start()
    with directory.connect("a.sock") as client:
        assert client.recv(5) == b"hello"
    echo.join()
    listener.close()
    directory.close()


def test_control_plain_long_path_is_refused(tmp_path: Path) -> None:
    """Negative control: the kernel refuses such a path directly."""
    path = tmp_path / ("d" * 100) / "a.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="too long"):
        sock.bind(str(path))


def test_a_stale_socket_is_replaced_and_is_private(tmp_path: Path) -> None:
    """A restart takes over the name. Only the owner may connect."""
    directory = SocketDirectory(tmp_path / "run")
    directory.listen("a.sock").close()
    listener = directory.listen("a.sock")
    assert (tmp_path / "run" / "a.sock").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    listener.close()
    directory.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    directory = SocketDirectory(tmp_path)
    with pytest.raises(ValueError, match="plain file name"):
        directory.address(name)
    directory.close()


def test_unpublished_socket_takes_the_name_when_published(tmp_path: Path) -> None:
    """Until it is published, clients reach the old socket."""
    directory = SocketDirectory(tmp_path)
    with directory.listen("a.sock") as old, directory.listen_unpublished("a.sock") as new:
        for listener in (old, new):
            listener.setblocking(False)
        with directory.connect("a.sock"), old.accept()[0], pytest.raises(BlockingIOError):
            new.accept()
        directory.publish("a.sock")
        with directory.connect("a.sock"), new.accept()[0], pytest.raises(BlockingIOError):
            old.accept()
    assert [each.name for each in tmp_path.iterdir()] == ["a.sock"]


def test_discarded_socket_leaves_no_file(tmp_path: Path) -> None:
    """A process that ends before it is ready leaves the old socket in place."""
    directory = SocketDirectory(tmp_path)
    with directory.listen("a.sock"):
        directory.listen_unpublished("a.sock").close()
        directory.discard_unpublished("a.sock")
        assert directory.is_served("a.sock")
    assert not directory.is_served("a.sock")
    assert [each.name for each in tmp_path.iterdir()] == ["a.sock"]
