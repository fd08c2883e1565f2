"""One supervisor per data directory: a close-on-exec flock, gone with the process that holds it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class AlreadyRunning(Exception):
    """Another process holds the data directory."""


@contextmanager
def data_lock(data: Path) -> Iterator[None]:
    """Hold `DATA/lock`. Raises AlreadyRunning with the holder's process id where it is known."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(f"{data} is in use by process {holder}") from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(fd)
