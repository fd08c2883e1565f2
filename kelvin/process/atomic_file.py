"""Write files atomically: whole or not at all, with the right mode from the start, and durable once they exist."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

# link(2): errors of FAT, and of some network and FUSE file systems.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class PendingFile:
    """A draft that gets its name by `commit`."""

    file: BinaryIO
    _path: Path
    _target: Path

    def commit(self, *, replace: bool = True, durable: bool = True) -> None:
        """Give the file its name. If `durable`, content, name and mode survive a power cut once this returns.

        Raises OSError; FileExistsError if another file has the name and `replace` is False. Without hard links, a file
        that takes the name at the same moment is replaced all the same.
        """
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        if not (replace or self._is_linked()):
            if os.path.lexists(self._target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._target))
            replace = True
        if replace:
            self._path.rename(self._target)
        if durable:
            sync(self._target.parent)

    def _is_linked(self) -> bool:
        """Add the name as a hard link. Return False if the file system has no hard links."""
        try:
            os.link(self._path, self._target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True


@contextmanager
def pending_file(path: Path, mode: int) -> Iterator[PendingFile]:
    """Yield a draft of `path` in the same directory. It is removed unless it was committed. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield PendingFile(file, draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes, mode: int, *, durable: bool = True) -> None:
    """Write the file, or replace it, and make its directory if needed. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pending_file(path, mode) as draft:
        draft.file.write(content)
        draft.commit(durable=durable)


def remove_pending_files(directory: Path, names: str) -> None:
    """Remove drafts of a killed process, of files that match the pattern `names`. One that can't be removed stays."""
    for draft in directory.glob(f".{names}.{'[0-9a-f]' * 16}"):
        with suppress(OSError):
            draft.unlink()


def sync(path: Path) -> None:
    """Make a file's bytes durable, or a directory's changed names. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
