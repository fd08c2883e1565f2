"""The file operations of a spool, in one class, so that tests can simulate a disk that is full, fails or loses writes.

Frames are unknown here. Every method raises OSError, and leaves no file behind that it could not finish.
"""

import os
from pathlib import Path
from typing import Final

from kelvin.process.atomic_file import sync

SUFFIX: Final = ".seg"
_DIGITS: Final = 20


def segment_name(first: int) -> str:
    """Return the file name of the segment whose first record has the sequence `first`."""
    return f"{first:0{_DIGITS}d}{SUFFIX}"


def segments(directory: Path) -> list[int]:
    """Return the first sequences of the directory's segments, ascending."""
    with os.scandir(directory) as entries:
        names = [
            entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        ]
    stems = (name.removesuffix(SUFFIX) for name in names)
    return sorted(int(stem) for stem in stems if len(stem) == _DIGITS and stem.isascii() and stem.isdigit())


class SegmentDisk:
    """The real disk: calls the operating system."""

    def create(self, path: Path, size: int) -> int:
        """Create a file of `size` zero bytes and return its descriptor. Blocks are reserved, so later writes fit."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def write(self, fd: int, payload: bytes, offset: int) -> None:
        """Write all of `payload`. A short write is continued."""
        view = memoryview(payload)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        """Return once written bytes are durable (fdatasync)."""
        os.fdatasync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Make created and removed names durable."""
        sync(directory)

    def truncate(self, fd: int, size: int) -> None:
        """Truncate the file to `size` bytes."""
        os.ftruncate(fd, size)
