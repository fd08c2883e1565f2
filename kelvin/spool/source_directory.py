"""A source's directory and its lock. The holder of the flock writes the spool, or ships a dead process's records."""

import errno
import fcntl
import logging
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from kelvin.spool.segment_disk import SegmentDisk, segments
from kelvin.spool.segment_reader import POSITION, encode_position, last_sequence, read_position, remove_segment

log = logging.getLogger(__name__)

_denied: set[Path] = set()  # directories that were logged already
_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def sources(root: Path) -> list[str]:
    """Return the sorted names of directories in `root` that can be sources. Skips others, as `lost+found`."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _SOURCE.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []


def readable_sources(root: Path) -> list[str]:
    """Return `sources` without directories that this user can't read. Each of those is logged once."""
    found = []
    for source in sources(root):
        path = root / source
        if os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            found.append(source)
        elif path not in _denied:
            _denied.add(path)
            log.warning("a directory that can't be read is ignored", extra={"directory": source})
    return found


def is_shipped(directory: Path) -> bool:
    """Return whether nothing is left to ship: the directory is gone, or has only damaged segments and foreign files."""
    try:
        names = os.listdir(directory)
        return bool(names) and POSITION not in names and not segments(directory)
    except FileNotFoundError:
        return True


def has_owner(root: Path, source: str) -> bool:
    """Return whether the process that writes `source`, or ships its leftovers, is alive. Raises OSError. The call holds
    the lock for an instant. A recovery at that instant skips this source until its next run.
    """
    try:
        fd = os.open(root / source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class SourceDirectory:
    """The directory `root`/`source`, locked until closed. The lock ends with the process in any case."""

    def __init__(self, root: Path, source: str, fd: int) -> None:
        self.path = root / source
        self.source = source
        self._fd = fd

    def __repr__(self) -> str:
        return f"<SourceDirectory {self.source}>"

    @classmethod
    def lock(cls, root: Path, source: str, disk: SegmentDisk | None = None) -> "SourceDirectory":
        """Lock the directory, and create it if it is missing. Its name is durable on return. Raises BlockingIOError if
        a live process has it, OSError, and ValueError for a bad name.
        """
        if _SOURCE.fullmatch(source) is None:
            raise ValueError(f"source {source!r}: must be 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Try an existing directory first, because a full disk allows no new one; and last, because another process may
        # create it.
        source_directory = cls.try_lock(root, source) or cls._try_create(root, source) or cls.try_lock(root, source)
        if source_directory is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "this source has a live owner", str(root / source))
        try:
            # Otherwise a power cut could remove the directory with its durable records.
            (disk or SegmentDisk()).sync_directory(root)
        except BaseException:
            source_directory.close()
            raise
        return source_directory

    @classmethod
    def _try_create(cls, root: Path, source: str) -> "SourceDirectory | None":
        """Create the directory with its lock held, so that no recovery takes it for a dead process's."""
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (fresh / POSITION).write_bytes(encode_position(0))  # never empty: a rename replaces an empty directory
            fresh.rename(root / source)
        except BaseException as error:
            os.close(fd)
            (fresh / POSITION).unlink(missing_ok=True)
            fresh.rmdir()
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None
            raise
        return cls(root, source, fd)

    @classmethod
    def try_lock(cls, root: Path, source: str) -> "SourceDirectory | None":
        """Lock the directory. Return None if it does not exist, or another process has the lock."""
        path = root / source
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed it between open and lock.
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return cls(root, source, fd)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    @property
    def is_open(self) -> bool:
        """Return whether the lock is still held."""
        return self._fd >= 0

    def remove_if_shipped(self) -> None:
        """Remove the directory if every record in it was acknowledged. Segments with unreadable bytes stay in it.
        Errors of the disk are logged.
        """
        try:
            if last_sequence(self.path) > read_position(self.path):
                return
            for first in segments(self.path):
                remove_segment(self.path, first)
            # Last: without the position, everything that is left would be shipped again.
            (self.path / POSITION).unlink(missing_ok=True)
        except OSError as error:
            log.error("a shipped spool can't be removed", extra={"source": self.source, "error": repr(error)})
            return
        with suppress(OSError):  # it still has a damaged segment or a foreign file
            self.path.rmdir()

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
