"""Unix sockets in a directory whose path may exceed the length of a socket address (107 bytes, unix(7)).

They are addressed through `/proc/self/fd/N/name`, where N is a descriptor of the directory.
"""

import os
import socket
import struct
from pathlib import Path
from typing import Final

BACKLOG: Final = 1024
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class SocketDirectory:
    """A directory of mode 0700 that holds sockets. Keeps one descriptor open until closed."""

    def __init__(self, path: Path, *, is_ours: bool = True) -> None:
        """Create the directory if `is_ours`; otherwise use it unchanged. Raises OSError."""
        if is_ours:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        self.path = path
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __repr__(self) -> str:
        return f"<SocketDirectory {self.path}>"

    def address(self, name: str) -> str:
        """Return a short address of `name`, whatever the directory's path. Valid in this process until `close`."""
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"socket name {name!r}: must be a plain file name")
        return f"/proc/self/fd/{self._fd}/{name}"

    def listen(self, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a listening socket of mode 0600. Replaces a stale socket of that name. The name appears once the
        socket listens, so a client that finds it is never refused.
        """
        sock = self.listen_unpublished(name, kind)
        try:
            self.publish(name)
        except BaseException:
            sock.close()
            raise
        return sock

    def listen_unpublished(self, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a listening socket of mode 0600 without its name. Call `publish(name)` in the same process."""
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        early = self._unpublished_name(name)
        try:
            early.unlink(missing_ok=True)
            sock.bind(self.address(early.name))
            early.chmod(0o600)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def publish(self, name: str) -> None:
        """Give `name` to this process's unpublished socket, replacing another socket of that name. Raises OSError."""
        self._unpublished_name(name).rename(self.path / name)

    def discard_unpublished(self, name: str) -> None:
        """Remove the file of a socket that was never published. The caller closes the socket."""
        self._unpublished_name(name).unlink(missing_ok=True)

    def _unpublished_name(self, name: str) -> Path:
        return self.path / f".{name}.{os.getpid()}"

    def is_served(self, name: str) -> bool:
        """Return whether a process listens at `name`."""
        try:
            self.connect(name, timeout_s=0.2).close()
        except OSError:
            return False
        return True

    def connect(self, name: str, kind: int = socket.SOCK_STREAM, timeout_s: float = 5.0) -> socket.socket:
        """Return a connected blocking socket with this timeout. Raises OSError if no process listens."""
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.address(name))
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Close the directory's descriptor. Addresses returned before become invalid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def peer_pid(sock: socket.socket) -> int:
    """Return the process at the other end, as the kernel knows it: the one that called listen or connect."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)
