"""What the tests of reads need to know of a file system, and do to the page cache."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest


def needs_a_disk(path: Path) -> None:
    """Skip where files are nowhere but in the page cache."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{kind} has nothing but the page cache")


def forget(path: Path) -> None:
    """Make the file cold."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT, as tmpfs did before Linux 6.6."""
    real_open, real_fcntl = os.open, fcntl.fcntl

    def open_plainly(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access here")
        return real_open(path, flags, mode)

    def set_plainly(fd: int, command: int, *flags: int) -> int:
        if flags and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "nor here")
        return real_fcntl(fd, command, *flags)

    patch.setattr(os, "open", open_plainly)
    patch.setattr(fcntl, "fcntl", set_plainly)
