"""Disks for tests: skip without a disk, empty the page cache, and make a disk refuse calls."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest


def needs_a_disk(path: Path) -> None:
    """Skip the test if the file system is in memory and has only the page cache."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{kind} has nothing but the page cache")


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """Make the file system refuse O_DIRECT, as tmpfs did before Linux 6.6."""
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


def fill(patch: pytest.MonkeyPatch) -> None:
    """Make the disk full: every write fails with ENOSPC."""

    def full(fd: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    patch.setattr(os, "pwritev", full)


def make_read_only(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Make the file system below `root` read-only."""
    real = os.open

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    def open_to_read(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and root in Path(path).parents:
            refuse()
        return real(path, flags, mode)

    patch.setattr(os, "open", open_to_read)
    for call in ("rename", "unlink", "utime"):
        patch.setattr(os, call, refuse)


def refuse_removal(patch: pytest.MonkeyPatch, stuck: Path) -> None:
    """Make the removal of one file fail with EIO."""
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise OSError(errno.EIO, "refused", str(path))
        unlink(path, missing_ok)

    patch.setattr(Path, "unlink", refusing)
