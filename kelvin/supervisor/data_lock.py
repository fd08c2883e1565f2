"""Lock a data directory for one supervisor: a close-on-exec flock that ends with its holder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kelvin.process.hardening import make_private


class AlreadyRunning(Exception):
    """Another process holds the data directory's lock."""


class InsecureDirectory(Exception):
    """The data directory, which will hold keys, belongs to another user, and others can open it."""


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Set `path` as the file name of an OSError that has none, such as one of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def data_lock(data: Path, *, keeps_secrets: bool = False) -> Iterator[int]:
    """Hold `DATA/lock` and yield its descriptor. A child process that inherits it holds the lock, too.

    Creates the directory if it is missing, and removes other users' access if it is ours. Raises AlreadyRunning with
    the holder's pid, if known. With `keeps_secrets`, raises InsecureDirectory if the directory belongs to another user
    and is open to group or others. Otherwise such a directory is accepted: a pod's volume belongs to root, and the pod
    has no other user.
    """
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not make_private(data) and keeps_secrets:
        owner, mode = data.stat().st_uid, data.stat().st_mode & 0o7777
        raise InsecureDirectory(
            f"{data} belongs to user {owner} and has mode {mode:04o}: other users could read or replace keys in it. "
            f"Use a directory of your own, or run: chown {os.geteuid()} {data}; chmod 0700 {data}"
        )
    fd = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(f"{data} is in use by process {holder}") from None
        os.ftruncate(fd, 0)
        with name_path_in_errors(data / "lock"):
            os.write(fd, f"{os.getpid()}\n".encode())
        yield fd
    finally:
        os.close(fd)
