"""The few file operations a journal needs, in one place, so that tests can make a disk that is full, failing or losing.

Nothing here knows frames. Every method raises OSError; none leaves a file behind that it could not finish.
"""

import os
from pathlib import Path
from typing import Final

from kelvin.process.atomic_file import sync

SUFFIX: Final = ".seg"
_DIGITS: Final = 20


def segment_name(first: int) -> str:
    """The file name of the segment whose first record has that sequence."""
    return f"{first:0{_DIGITS}d}{SUFFIX}"


def segments(directory: Path) -> list[int]:
    """First sequences of the directory's segments, ascending."""
    with os.scandir(directory) as entries:
        names = [
            entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        ]
    stems = (name.removesuffix(SUFFIX) for name in names)
    return sorted(int(stem) for stem in stems if len(stem) == _DIGITS and stem.isascii() and stem.isdigit())


class SegmentDisk:
    """The real one."""

    def create(self, path: Path, size: int) -> int:
        """A new file of `size` zero bytes whose blocks are reserved now, so that a later write finds room."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        """All of it; a short write goes on where it stopped."""
        view = memoryview(payload)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        """Returns once what was written is durable (fdatasync)."""
        os.fdatasync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Makes created and removed names durable."""
        sync(directory)

    def cut(self, fd: int, size: int) -> None:
        """Drop everything from `size` on."""
        os.ftruncate(fd, size)
